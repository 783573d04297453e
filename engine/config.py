"""The settings of the engine. This module does not import torch.

Command-line flags are generated from the fields of `EngineConfig`: `metadata["help"]` is the help text of the flag and
`metadata["choices"]` its choices; `metadata["joint"]` joins the values of a repeated flag to one text.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.limits import DEFAULT_QUEUE, QueueTime, SchedulerConfig, require_positive
from engine.refusals import check_combinations
from predictor.slo import SLO, SLOError

USUAL_STEP, WIDE_STEP = (64, 512), (256, 2048)
"""Default maximum (requests, tokens) of a step."""
WIDE_CONTEXT = 256
"""Tokens per request of a wide step for which a GPU must have memory beside the weights."""
MAX_THREADS = 1024  # rejects a typing error that would exhaust the threads of the machine
OVERLOADS = ("recompute", "hidden", "drop")
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def flag(default: Any, help_text: str, choices: tuple[str, ...] = (), *, joint: str = "", secret: bool = False) -> Any:
    """Return a config field that is a flag; see `tidemill.flags.Flag`."""
    return field(default=default, repr=not secret, metadata={"help": help_text, "choices": choices, "joint": joint})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of the engine. None means that the value is derived from the model and the machine."""

    model: str = flag(
        "",
        "folder or Hugging Face id of a checkpoint, or http://HOST:PORT of a vLLM for batches; empty: the demo model",
    )
    revision: str | None = flag(None, "branch, tag or commit of a model from the hub (default: the newest)")
    model_impl: str = flag(
        "auto",
        "layers that run the model: own, or those of transformers with our attention and cache; auto: own where the "
        "family is supported",
        ("auto", "own", "transformers"),
    )
    generation_config: str = flag(
        "auto", "sampling defaults of requests; auto: the checkpoint's generation_config.json", ("auto", "none")
    )
    device: str = flag("auto", "device that runs the model", ("auto", "cpu", "cuda"))
    dtype: str = flag("auto", "type of weights and cache", ("auto", "bfloat16", "float16", "float32"))
    kv_cache_dtype: str = flag(
        "auto",
        "type of K and V in the cache; int8: 8 bits and a scale per head, about twice the tokens in the same memory",
        ("auto", "int8"),
    )
    kernels: str = flag(
        "auto",
        "operations of a step; auto: our kernels if they pass their test; no-graphs: on a GPU without CUDA graphs; "
        "torch: torch operators",
        ("auto", "no-graphs", "torch"),
    )
    quantization: str = flag(
        "none",
        "linear layers of fewer bits, with weights rounded once and inputs in every step; int8: integers of 8 bits, on "
        "a CPU; int4: weights of 4 bits, on a CPU; fp8: 8-bit floats, on a GPU of compute capability 8.9 or newer",
        ("none", "int8", "int4", "fp8"),
    )
    speculation: str = flag(
        "auto",
        "verify guesses of an answer's next tokens, from its context and from earlier answers, in steps that have time "
        "for them; answers stay the same up to rounding; auto: on a CPU, since no GPU was measured",
        ("auto", "on", "off"),
    )
    threads: int | None = flag(None, "processor threads of a step on a CPU (default: measured, at most one per core)")
    load_format: str = flag("auto", "dummy: random weights for benchmarks", ("auto", "safetensors", "dummy"))
    self_test: bool = flag(
        True, "before serving, compare a few tokens with transformers' eager attention; end the start if they differ"
    )
    lora: tuple[str, ...] = flag(
        (),
        "NAME=PATH of a LoRA adapter stored by peft; requests select it as model NAME or MODEL:NAME; repeat for "
        "several",
    )
    max_model_len: int | None = flag(None, "longest prompt plus output, tokens (default: the model's)")
    num_gpu_blocks_override: int | None = flag(None, "size of the cache in blocks of KV, also on a CPU")
    gpu_memory_utilization: float = flag(0.9, "share of the device's memory for weights and cache")
    max_num_seqs: int | None = flag(
        None, "maximum requests in a step (default: 64; 256 on a GPU with room for them, or if weights stream)"
    )
    max_num_batched_tokens: int | None = flag(
        None, "maximum tokens in a step (default: 512; 2048 on a GPU with room for 256 requests, or if weights stream)"
    )
    max_queue_time: str = flag(
        DEFAULT_QUEUE,
        "maximum wait before an online request is refused with 429: 5s, 1x (the TTFT objective), or none",
    )
    enable_prefix_caching: bool = flag(True, "share equal prompt prefixes between requests of one tenant")
    slo: str = flag(
        "ttft_p99=1s,tbt_p99=100ms",
        "objectives of online requests; also 'tbt_mean=50ms' or '5%'; repeat with NAME: for a class of requests, as in "
        "premium:ttft_p99=300ms,tbt_p99=50ms or agent:e2e_p99=20s",
        joint=";",
    )
    online_policy: str = flag(
        "goodput-strict",
        "order of online requests if memory is short: goodput-strict, goodput[:TAIL], apt[:TAIL], larry[:ALPHA], fcfs",
    )
    offload_weights: str = flag(
        "off", "memory for weights in GiB, or auto (free memory); the rest streams in every step; off: none streams"
    )
    swap_space: float | None = flag(
        None,
        "GiB of host memory for the cache of preempted requests and of chats until their next turn (default: on a "
        "GPU a quarter of the free memory, at most 16; otherwise 0); with --offload-weights, for the cache of running "
        "requests, which then streams, too (CPU: in a file)",
    )
    overload: str = flag(
        "recompute",
        "action if memory for online requests runs out: recompute (preempt the last requests, see --swap-space), "
        "hidden (with apt or goodput, also run requests from hidden state if the model allows it), or drop (two "
        "engines become one pipeline, and the memory of the layers that each drops holds requests)",
        OVERLOADS,
    )
    profile_dir: str = flag("", "folder of latency profiles (default: tidemill/profiles in the user's cache)")
    profile_seconds: float = flag(30.0, "maximum seconds to measure step times if no profile fits (0: one step only)")

    @property
    def hidden_cache(self) -> bool:
        """Return whether requests may run from hidden state."""
        return self.overload == "hidden"

    def __post_init__(self) -> None:
        for name, path in (
            ("MODEL", self.model),
            ("--profile-dir", self.profile_dir),
            *(("--lora", p) for p in self.lora),
        ):
            _check_utf8(name, path or "")
        require_positive(self, "max_num_seqs", "max_num_batched_tokens")
        require_positive(self, "max_model_len", "num_gpu_blocks_override", "threads")
        if (self.threads or 0) > MAX_THREADS:
            raise ConfigError(f"--threads must be at most {MAX_THREADS}, not {self.threads}")
        QueueTime.parse(self.max_queue_time)
        parse_slo(self.slo)
        parse_offload(self.offload_weights)
        parse_adapters(self.lora)
        if not 0.0 <= (self.swap_space or 0.0) <= 65536.0:
            raise ConfigError(f"--swap-space must be between 0 and 65536 GiB, not {self.swap_space}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            share = self.gpu_memory_utilization
            meant = f"; did you mean {share / 100:g}?" if 10.0 <= share <= 100.0 else ""
            raise ConfigError(f"--gpu-memory-utilization is a share, above 0 and at most 1, not {share}{meant}")
        if not 0.0 <= self.profile_seconds <= 600.0:
            raise ConfigError(f"--profile-seconds must be between 0 and 600, not {self.profile_seconds}")
        check_combinations(self)


def _check_utf8(name: str, path: str) -> None:
    """Raise ConfigError for a path that the engine process and the libraries of models cannot take."""
    encoded = os.fsencode(path)
    if encoded != path.encode(errors="replace"):
        shown = encoded.decode(errors="backslashreplace")
        raise ConfigError(f"{name} {shown} is not UTF-8; rename it, or link to it under a name in UTF-8")


def step_limits(config: EngineConfig, *, wide: bool = False) -> tuple[int, int]:
    """Return the maximum (requests, tokens) of a step.

    An explicit setting wins. Otherwise the default applies, larger if `wide` (many rows share the cost of a step), and
    adjusted so that a step has at least one token per request.
    """
    seqs, tokens = WIDE_STEP if wide else USUAL_STEP
    if config.max_num_seqs is not None:
        return config.max_num_seqs, config.max_num_batched_tokens or max(tokens, config.max_num_seqs)
    if config.max_num_batched_tokens is not None:
        return min(seqs, config.max_num_batched_tokens), config.max_num_batched_tokens
    return seqs, tokens


def is_wide(room: int, max_model_len: int) -> bool:
    """Return whether `room` tokens of cache suffice for the requests of a wide step."""
    return room >= WIDE_STEP[0] * min(WIDE_CONTEXT, max_model_len)


def scheduler_settings(config: EngineConfig, **resolved: Any) -> SchedulerConfig:
    """Return the settings of the scheduler: those in `config`, overridden by `resolved`."""
    seqs, tokens = step_limits(config)
    given: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    given |= {"max_queue_time": config.max_queue_time, "enable_prefix_caching": config.enable_prefix_caching}
    return SchedulerConfig(**given | resolved)


def parse_offload(text: str) -> float | None:
    """Return the GiB for weights from `--offload-weights`: None for "off", infinity for "auto". Raise ConfigError."""
    if text == "off":
        return None
    if text == "auto":
        return float("inf")
    try:
        budget = float(text)
    except ValueError:
        budget = -1.0
    if not 0.0 < budget < 65536.0:
        raise ConfigError(f"--offload-weights must be off, auto or a number of GiB, not {text!r}")
    return budget


class NamedFolder(NamedTuple):
    """A LoRA adapter. Requests refer to it by its number, from 1 in the order given."""

    name: str
    folder: Path


def parse_adapters(words: Sequence[str]) -> tuple[NamedFolder, ...]:
    """Parse the values of `--lora`. Raise ConfigError if a value is not NAME=PATH or a name occurs twice."""
    found: dict[str, NamedFolder] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (equals and path and _ADAPTER_NAME.fullmatch(name)):
            raise ConfigError(
                f"--lora must be NAME=PATH with a name of letters, digits, '.', '_', '-' and '/', not {word!r}"
            )
        if name in found:
            raise ConfigError(f"--lora {name} is given twice; use another name")
        found[name] = NamedFolder(name, Path(path).expanduser())
    return tuple(found.values())


def parse_slo(text: str) -> SLO:
    """Return the objectives of `--slo`. Raise ConfigError."""
    try:
        return SLO.parse(text)
    except SLOError as error:
        raise ConfigError(f"--slo: {error}") from None
