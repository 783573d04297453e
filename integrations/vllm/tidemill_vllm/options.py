"""Options of the scheduler, and the reasons for which vLLM's own scheduler runs instead."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.slo import SLO, SLOError

KEY = "tidemill"
"""Key of the options in `--additional-config`."""
FIRST_RELEASE = (0, 24)
"""First release of vLLM with the attributes that are used."""
NEEDED = (
    "running", "waiting", "requests", "max_num_scheduled_tokens", "max_num_running_reqs", "kv_cache_manager",
    "num_spec_tokens", "block_size", "policy", "_preempt_request",
)  # fmt: skip
"""Attributes of vLLM's scheduler that are used."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options under `tidemill` in `--additional-config`.

    Attributes:
        slo: The promise, in the syntax of `tidemill serve --slo`.
        sweep_seconds: Time for measuring steps at the first start; 0: none.
        fit_dir: Folder of the fits; empty: they are not kept.
    """

    slo: SLO
    sweep_seconds: float = 10.0
    fit_dir: Path | None = None

    @classmethod
    def of(cls, vllm_config: Any) -> "Options":
        """Read the options. Raises ValueError with one line that says what to change."""
        found = vllm_config.additional_config
        stated = found.get(KEY, {}) if isinstance(found, dict) else {}
        unknown = (
            sorted(set(stated) - {"slo", "sweep_seconds", "fit_dir"}) if isinstance(stated, dict) else ["not an object"]
        )
        if unknown:
            raise ValueError(f"tidemill: unknown option {unknown[0]!r}; known are slo, sweep_seconds, fit_dir")
        if "slo" not in stated:
            example = f'--additional-config \'{{"{KEY}": {{"slo": "ttft_p99=1s,tbt_p99=100ms"}}}}\''
            raise ValueError(f"tidemill: no SLO; add {example}")
        if str(getattr(vllm_config.scheduler_config, "policy", "")) != "priority":
            raise ValueError("tidemill: add --scheduling-policy priority; a request with a priority above 0 is offline")
        try:
            slo = SLO.parse(str(stated["slo"]))
        except SLOError as error:
            raise ValueError(f"tidemill: {error}") from None
        seconds = stated.get("sweep_seconds", 10.0)
        if not isinstance(seconds, int | float) or not 0 <= seconds <= 600:
            raise ValueError(f"tidemill: sweep_seconds is {seconds!r}; use 0 to 600")
        return cls(slo, float(seconds), _folder(stated.get("fit_dir")))


def _folder(stated: object) -> Path | None:
    if stated == "":
        return None
    if stated is not None:
        return Path(str(stated)).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tidemill" / "vllm"


def refusal(vllm_config: Any, version: str) -> str | None:
    """Return why vLLM's own scheduler must run, or None. `version`: that of vLLM."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if release < FIRST_RELEASE:
        return f"vLLM {version} is older than {FIRST_RELEASE[0]}.{FIRST_RELEASE[1]}"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported"
    if parallel.data_parallel_size > 1:
        return "data parallelism is not supported"
    if vllm_config.kv_transfer_config is not None:
        return "KV connectors are not supported"
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return "chunked prefill is off"
    if vllm_config.model_config.runner_type == "pooling":
        return "pooling models are not supported"
    return None


def missing(scheduler: Any) -> str | None:
    """Return the name of an attribute that this release of vLLM lacks, or None."""
    return next((name for name in NEEDED if not hasattr(scheduler, name)), None)
