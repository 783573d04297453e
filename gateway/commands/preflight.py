"""Checks that `serve` and `serve --dry-run` run before any folder or process is created.

They cover invalid names, files, folders and addresses. The engine's launch plan checks the model and the device.
"""

import errno
import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig, parse_adapters
from engine.errors import ConfigError
from engine.machine.output import say
from engine.refusals import check_combinations
from gateway.config import ServerConfig
from predictor.slo import SLO


def check_start(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Check both configs without changing anything. Raise ConfigError, one line that names the flag."""
    check_combinations(engine_config, server_config)
    _check_engine(engine_config)
    _check_server(server_config, [name for name, _ in SLO.parse(engine_config.slo).by_class])


def check_folder(flag: str, path: str | os.PathLike[str], *, written: bool = True, faults_pass: bool = False) -> Path:
    """Return `path`, or its nearest existing parent. Raise ConfigError if `path` is not, or cannot become, a folder.

    `written` requires write permission. `faults_pass` accepts a read-only file system, which may recover later.
    """
    here = Path(path).expanduser().absolute()
    try:
        while not here.exists():
            here = here.parent
        if not here.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if written and not os.access(here, os.W_OK | os.X_OK):
            if os.statvfs(here).f_flag & os.ST_RDONLY:
                if faults_pass:
                    return here
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"{flag} {os.fspath(path)} cannot be used: {error.strerror}") from None
    return here


def _check_engine(config: EngineConfig) -> None:
    importlib.import_module("engine.scheduling.policies").find_policy(config.online_policy)
    for adapter in parse_adapters(config.lora):
        if not (adapter.folder / "adapter_config.json").is_file():
            raise ConfigError(f"--lora {adapter.name}: {adapter.folder} has no adapter_config.json")
    if config.profile_dir:
        check_folder("--profile-dir", config.profile_dir, written=False)  # read-only is fine for existing profiles


def _check_server(config: ServerConfig, classes: Sequence[str]) -> Path:
    """Check address, state folder, API keys, chat template, request log and tracing; return the state folder.

    `classes`: the service classes of --slo.
    """
    if config.ray and importlib.util.find_spec("ray") is None:
        raise ConfigError("--ray needs the extra 'ray': pip install 'tidemill[ray]'")
    importlib.import_module("gateway.server").bind(config.host, config.port).close()
    opening = importlib.import_module("gateway.store.opening")
    place = opening.find_state(config.state_dir)
    state: Path = place.folder
    if place.database is not None:
        opening.find_postgres()
    check_folder("--state-dir", state, faults_pass=True)
    opening.check_free(state)
    _check_keys(config, classes)
    if config.chat_template is not None:
        importlib.import_module("engine.text.tokenizer").read_template(config.chat_template)
    if config.request_log is not None:
        importlib.import_module("gateway.telemetry.request_log").check_path(config.request_log)
    importlib.import_module("gateway.telemetry.tracing").find_endpoint(os.environ)
    importlib.import_module("gateway.batch.webhooks").read_rules(os.environ)
    importlib.import_module("gateway.batch.notices").read_command(os.environ)
    return state


def _check_keys(config: ServerConfig, classes: Sequence[str]) -> None:
    """Check the keys and their classes; warn of a key file that any user can read."""
    keys = importlib.import_module("gateway.http.keys")
    for unknown in sorted(keys.load_keys(config.api_key, config.api_key_file).classes.difference(classes)):
        raise ConfigError(f"--api-key-file: unknown service class '{unknown}'; --slo has {', '.join(classes)}")
    if config.api_key_file is not None and keys.is_readable_by_others(config.api_key_file):
        say(f"--api-key-file {config.api_key_file}: any user can read its tenants and digests; mode 0640 hides them")
