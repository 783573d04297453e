"""Flags that the model or the device does not support, and why. Flags that exclude each other: `engine.refusals`."""

from engine.config import (
    EngineConfig,
)
from engine.execution.backend import Backend
from engine.models.implementation import TRANSFORMERS, Choice
from engine.models.packing import Packing
from engine.models.spec import ModelShape, ModelSpec, hidden_offer
from engine.refusals import unsupported


def check_model(config: EngineConfig, choice: Choice, backend: Backend, dtype: str) -> None:
    """Raise ConfigError for a flag that the model or the device does not support."""
    spec, foreign = choice.shape, choice.implementation == TRANSFORMERS
    by_modules = f"transformers' modules run {spec.architecture}"
    if foreign and config.kv_cache_dtype != "auto":
        raise unsupported(f"--kv-cache-dtype {config.kv_cache_dtype}", by_modules)
    if foreign and config.quantization != "none":
        raise unsupported(f"--quantization {config.quantization}", by_modules)
    if spec.state_bytes and not config.enable_prefix_caching and (config.swap_space or config.overload == "swap"):
        raise unsupported(
            "--swap-space", f"{spec.architecture} has recurrent layers", "remove --no-enable-prefix-caching"
        )
    if config.overload == "drop" and (refusal := _drop_refusal(choice, backend, dtype)):
        raise unsupported("--overload drop", refusal)


def _drop_refusal(choice: Choice, backend: Backend, dtype: str) -> str | None:
    """Why no engine of this model can give up layers on this machine; None if it can."""
    spec = choice.shape
    if choice.implementation == TRANSFORMERS:
        return f"transformers' modules run {spec.architecture}"
    if spec.num_layers < 2:
        return f"{spec.architecture} has one layer"
    return backend.drop_refusal(spec, dtype)


def floats_refusal(config: EngineConfig, packing: Packing, backend: Backend) -> str | None:
    """Why no layer of ours computes with the floats of 8 bits that a checkpoint stores; None if they do."""
    if not packing.floats:
        return "products have a scale for an output, not for a block" if packing.block[0] > 1 else ""
    if config.dtype not in ("auto", "bfloat16"):
        return f"products are of bfloat16, not of {config.dtype}"
    return backend.float8_refusal()


def hidden_refusal(config: EngineConfig, spec: ModelShape) -> str | None:
    """Why no request will be run from hidden state; None if some may be, empty if nobody asked."""
    if not config.hidden_cache:
        return ""
    if not isinstance(spec, ModelSpec):
        return "transformers' modules keep the hidden state of their layers to themselves"
    return hidden_offer(spec).refusal or None
