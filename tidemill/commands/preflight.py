"""Checks that `serve` and `serve --dry-run` run before any folder or process is created, and the dry run's report.

The checks cover invalid names, files, folders and addresses. The engine's launch plan checks the model and the device.
The report has this machine, every setting with its origin, and the model that would be loaded. The dry run loads no
weights, downloads nothing and changes no file; it fails with the errors of a start.
"""

import errno
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine import __version__, openmp
from engine.config import EngineConfig, parse_adapters
from engine.errors import ConfigError
from engine.machine.child import say
from engine.machine.extras import install_command
from engine.machine.facts import available_memory, read_processor, share_out
from engine.refusals import check_combinations
from gateway.config import ServerConfig
from predictor.slo import SLO
from tidemill.flags import Flag, FlagValue, flags_of


def check_start(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Check both configs without changing anything. Raise ConfigError, one line that names the flag."""
    check_combinations(engine_config, server_config)
    _check_engine(engine_config)
    check_server(server_config, [name for name, _ in SLO.parse(engine_config.slo).by_class])


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
    from engine.scheduling.policies import find_policy

    find_policy(config.online_policy)
    for adapter in parse_adapters(config.lora):
        if not (adapter.folder / "adapter_config.json").is_file():
            raise ConfigError(f"--lora {adapter.name}: {adapter.folder} has no adapter_config.json")
    if config.profile_dir:
        check_folder("--profile-dir", config.profile_dir, written=False)  # read-only is fine for existing profiles


def check_server(config: ServerConfig, classes: Sequence[str]) -> None:
    """Check address, state folder, API keys, chat template, request log and tracing.

    `classes`: the service classes of --slo.
    """
    from engine.text.tokenizer import read_template
    from gateway.batch.notices import read_target
    from gateway.server import bind
    from gateway.store.disk import Bucket, Disk
    from gateway.store.folder import check_free, find_postgres, find_state
    from gateway.telemetry import request_log, tracing

    if config.ray and find_spec("ray") is None:
        raise ConfigError(f"--ray needs ray; run {install_command('ray')}")
    bind(config.host, config.port).close()
    place = find_state(config.state_dir)
    if place.database is not None:
        find_postgres()
    if place.objects is not None:
        Bucket(place.objects, Disk())
    check_folder("--state-dir", place.folder, faults_pass=True)
    check_free(place.folder)
    _check_keys(config, classes)
    if config.chat_template is not None:
        read_template(config.chat_template)
    if config.request_log is not None:
        request_log.check_path(config.request_log)
    tracing.find_endpoint(os.environ)
    read_target(os.environ)


def _check_keys(config: ServerConfig, classes: Sequence[str]) -> None:
    """Check the keys and their classes; warn of a key file that any user can read."""
    from gateway.http import keys

    for unknown in sorted(keys.load_keys(config.api_key, config.api_key_file).classes.difference(classes)):
        raise ConfigError(f"--api-key-file: unknown service class '{unknown}'; --slo has {', '.join(classes)}")
    if config.api_key_file is not None and keys.is_readable_by_others(config.api_key_file):
        say(f"--api-key-file {config.api_key_file}: any user can read its tenants and digests; mode 0640 hides them")


DEFAULT = "default"


def run(given: Mapping[str, FlagValue], engine_config: EngineConfig, server_config: ServerConfig, name: str) -> int:
    """Print the report and return the exit code. Raise the errors of a start. `name` is the model's name in the API."""
    from gateway.store.folder import state_path

    print("\n".join([*report_machine(__version__), ""]), flush=True)
    found: dict[str, FlagValue] = {}
    try:
        check_start(engine_config, server_config)
        places = _places(engine_config, server_config)
        lines = _look_ahead(engine_config, name, found, server_config.chat_template) + places
    finally:  # after an error, too: the origin of a setting often explains it
        found["served_model_name"] = FlagValue((name,), "the model")
        found["state_dir"] = FlagValue(state_path(server_config.state_dir), DEFAULT)
        print("\n".join(table(given, (engine_config, server_config), found)), flush=True)
    print("\n".join(["", *lines]))
    return 0


def table(given: Mapping[str, FlagValue], configs: Sequence[object], found: Mapping[str, FlagValue]) -> list[str]:
    """Format every setting in columns of flag, value and origin; `*` marks those that the user gave. `found` has the
    values chosen for settings whose default is automatic."""
    rows = []
    for config in configs:
        for flag in flags_of(type(config)):
            value, is_given = getattr(config, flag.field), flag.field in given
            origin = given[flag.field].origin if is_given else DEFAULT
            if value in (None, "", "auto", ()) and flag.field in found:
                value, why = found[flag.field]
                origin = f"{why} ({origin})" if is_given else why
            name = "MODEL" if flag.field == "model" else f"--{flag.key}"
            rows.append(("*" if is_given else " ", name, _shown(flag, value), origin))
    widths = max(len(row[1]) for row in rows), min(40, max(len(row[2]) for row in rows))
    return [f"{mark} {name:{widths[0]}}  {text:{widths[1]}}  {origin}" for mark, name, text, origin in rows]


def _shown(flag: Flag, value: Any) -> str:
    if flag.secret and value:
        return f"({len(value)} set)" if flag.many else "(set)"
    if value is None or value in ((), ""):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if flag.many else str(value)


def _places(engine_config: EngineConfig, server_config: ServerConfig) -> list[str]:
    """Return the place of each engine if there are several. Raise ConfigError if the machine has too few places."""
    if server_config.ray:
        return [line("engines", f"{server_config.engines} in the Ray cluster at {server_config.ray}")]
    if server_config.engines == 1:
        return []
    places = share_out(server_config.engines, engine_config.device)
    return [line(f"engine {number}", place.shown) for number, place in enumerate(places)]


def _look_ahead(config: EngineConfig, name: str, found: dict[str, FlagValue], template: str | None) -> list[str]:
    """Return lines about the model that would be loaded; store the chosen values in `found`."""
    from engine import build
    from engine.text.tokenizer import Tokenizer

    found["model"] = FlagValue("(the packaged demo model)", DEFAULT)
    found["profile_dir"] = FlagValue(build.profile_folder(config), DEFAULT)
    local = build.local_config(config)
    if local is None:
        pull = f"tidemill pull {name}" + (f" --revision {config.revision}" if config.revision else "")
        return [line("model", f"{name} is not on this machine; `{pull}` shows its size and downloads it")]
    plan = build.plan_launch(local)
    notes: list[str] = []
    plan, profile = build.stored_profile(local, plan, notes.append)
    tokenizer = Tokenizer.load(plan.folder, template)
    _decided(build, config, plan, found)
    warning = None if profile is None else build.slo_warning(SLO.parse(config.slo), profile.model)
    if profile is None:
        measured = f"none stored: a start would measure step times for at most {config.profile_seconds:g} s"
    else:
        error = f"{profile.num_samples} steps, held-out error {profile.held_out_mape:.1%}"
        measured = f"from {profile.created_at}, {error}"
    return [
        *report_launch(plan, name),
        line("ends", tokenizer.shown_ends(plan.spec.eos_token_ids)),
        line("memory", _model_memory(plan)),
        line("profile", measured),
        *(line("note", note) for note in notes),
        *([] if warning is None else [line("slo", warning)]),
    ]


def _decided(build: Any, config: EngineConfig, plan: Any, found: dict[str, FlagValue]) -> None:
    why = "the device" if plan.offload is None else "streamed weights"
    host = round(build.host_bytes(plan) / 2**30, 1)
    chosen = {
        "device": (plan.device, "this machine"),
        "model_impl": (plan.implementation, "the model's family"),
        "dtype": (plan.dtype, "the model and this machine"),
        "max_model_len": (plan.limits.max_model_len, "the model and the cache"),
        "num_gpu_blocks_override": (plan.num_blocks, "measured: free memory"),
        "max_num_seqs": (plan.limits.max_num_seqs, why),
        "max_num_batched_tokens": (plan.limits.max_num_batched_tokens, why),
        "swap_space": (host, "measured: free host memory" if host else "the cache itself is in host memory"),
    }
    if plan.device == "cpu":
        origin = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "at most one per core; a start measures"
        is_native = "native" in plan.kernels
        chosen["threads"] = openmp.num_threads(config, os.environ), origin
        chosen["kernels"] = plan.kernels, "measured: the native kernels pass their test" if is_native else "torch"
    found.update((name, FlagValue(*value)) for name, value in chosen.items())


def _model_memory(plan: Any) -> str:
    stay = "" if plan.offload is None else f" ({size(plan.held_bytes)} resident)"
    need = f"weights {size(plan.weight_bytes)}{stay}, cache {size(plan.cache_bytes)}"
    if plan.device != "cpu":
        return f"{need}, of {plan.memory_utilization:.0%} of the device"
    return f"{need}, of {size(available_memory())} free"


_IMPLEMENTATIONS = {"own": "native layers", "transformers": "transformers modules"}
_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn")


def report_machine(tidemill_version: str) -> list[str]:
    """Return lines for Python, the processor, memory, GPUs and library versions."""
    processor = read_processor()
    features = " ".join(processor.shown_features) or "vector features unknown"
    return [
        line("tidemill", tidemill_version),
        line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        line("cpu", processor.name),
        line("", f"{processor.cores} cores, {processor.threads} threads for this process; {features}"),
        line("memory", f"{size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} in total"),
        *_gpus(),
        line("libraries", ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)),
    ]


def report_launch(plan: Any, name: str) -> list[str]:
    """Return lines for the model and its cache. `plan` is an engine.execution.plan.LaunchPlan."""
    tokens = plan.num_blocks * plan.limits.block_size
    by = _IMPLEMENTATIONS[plan.implementation]
    about = "about " if plan.device == "cuda" else ""
    return [
        line("model", f"{name}: {plan.spec.architecture}, {plan.spec.num_parameters:,} parameters, {by}"),
        line("", f"{plan.precision} on {plan.device}, weights {size(plan.weight_bytes)}"),
        line("cache", f"{about}{tokens:,} tokens ({plan.num_blocks:,} blocks of {plan.limits.block_size})"),
        line("context", f"{plan.limits.max_model_len:,} tokens"),
        *(line("adapter", f"{each.name}: {each}") for each in plan.adapters),
        *(line("note", note) for note in plan.notes),
    ]


def line(label: str, text: str) -> str:
    return f"{label:<10} {text}"


def size(num_bytes: int) -> str:
    """Return the bytes in GiB or MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _gpus() -> list[str]:
    from torch import cuda

    if not cuda.is_available():
        return [line("gpu", "none usable by torch")]
    lines = []
    for index in range(cuda.device_count()):
        facts = cuda.get_device_properties(index)
        free, total = cuda.mem_get_info(index)
        memory = f"{size(total)}, {size(free)} free"
        lines.append(line("gpu", f"{facts.name}, {memory}, compute capability {facts.major}.{facts.minor}"))
    return lines


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
