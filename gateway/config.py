"""Configuration of the HTTP server. As in `EngineConfig`, the fields define the command line flags; the `metadata` of
a field contains the help and the choices of its flag."""

import re
from dataclasses import dataclass

from engine.config import flag
from engine.errors import ConfigError
from engine.refusals import check_combinations
from gateway.generate.tool_formats import FORMATS

TOOL_PARSERS = ("auto", *FORMATS)
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the server. Durations are in seconds, sizes in bytes.

    `api_key` contains the accepted keys (empty: no key is required); `repr` omits them. Raises ConfigError with the
    name of the flag for an invalid value.
    """

    host: str = flag("127.0.0.1", "address to listen on; any but loopback needs --api-key")
    allowed_host: tuple[str, ...] = flag(
        (), "another host name of the server, as behind a proxy; repeat for several, * for any"
    )
    allowed_origin: tuple[str, ...] = flag(
        (), "origin of web pages that may use the server (https://chat.example.com); repeat for several, * for any"
    )
    port: int = flag(8000, "TCP port; 0 lets the system choose")
    api_key: tuple[str, ...] = flag(
        (), "key that clients must send (safer in the environment); repeat for several of one tenant", secret=True
    )
    api_key_file: str | None = flag(
        None, "file of keys by tenant: lines of SHA-256, tenant and optional tier, roles, limits; SIGHUP reloads it"
    )
    served_model_name: tuple[str, ...] = flag(
        (), "model name in the API; repeat for aliases (default: the model's folder name)"
    )
    chat_template: str | None = flag(None, "file with a Jinja chat template (default: the checkpoint's)")
    tool_parser: str = flag(
        "auto",
        "format of the model's function calls; auto: read from its response_template or chat template",
        TOOL_PARSERS,
    )
    state_dir: str | None = flag(
        None,
        "folder for files and batches (default: $XDG_STATE_HOME/tidemill or ~/.local/state/tidemill), or a database "
        "for their rows and a place for their contents: postgresql://HOST/NAME?objects=file:///FOLDER or s3://BUCKET",
    )
    engines: int = flag(1, "number of engines, each on a CUDA device or on an equal part of the cores")
    ray: str = flag(
        "",
        "Ray cluster whose actors run the engines, each with a GPU or an equal part of the processors: HOST:PORT of "
        "its head, auto (this machine is a node), or local (a cluster for this server alone)",
    )
    shutdown_timeout: float = flag(30.0, "maximum seconds for running requests to end after SIGTERM")
    request_log: str | None = flag(
        None, "file for a JSON line per ended request, without its text; SIGHUP reopens it (logrotate)"
    )
    log_level: str = flag("info", "minimum level of log lines", LOG_LEVELS)

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ConfigError("--host must not be empty (0.0.0.0 or :: listens on every address)")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if not 0.0 <= self.shutdown_timeout <= 86400.0:
            raise ConfigError(f"--shutdown-timeout must be between 0 and 86400, not {self.shutdown_timeout}")
        if not 1 <= self.engines <= 256:
            raise ConfigError(f"--engines must be between 1 and 256, not {self.engines}")
        if self.ray and not re.fullmatch(r"auto|local|[^\s:/]+:[0-9]{1,5}|\[[0-9A-Fa-f:]+\]:[0-9]{1,5}", self.ray):
            raise ConfigError(f"--ray must be HOST:PORT, auto or local, not {self.ray!r}")
        if any(not key or key != key.strip() for key in self.api_key):
            raise ConfigError("--api-key must not be empty and must not begin or end with white space")
        for name in self.allowed_host:
            if not re.fullmatch(r"\*|[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", name):
                raise ConfigError(f"--allowed-host must be a name without scheme and port, not {name!r}")
        for origin in self.allowed_origin:
            if not re.fullmatch(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(
                    f"--allowed-origin must be SCHEME://HOST[:PORT] without a path, null or *, not {origin!r}"
                )
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name must not be empty")
        check_combinations(self)
