"""Refuse flags that the model or the device does not support. `engine.refusals` refuses combinations of flags."""

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
    """Return why engines of this model cannot drop layers on this machine; None if they can."""
    spec = choice.shape
    if choice.implementation == TRANSFORMERS:
        return f"transformers' modules run {spec.architecture}"
    if spec.num_layers < 2:
        return f"{spec.architecture} has one layer"
    return backend.drop_refusal(spec, dtype)


def floats_refusal(config: EngineConfig, packing: Packing, backend: Backend) -> str | None:
    """Return why our layers cannot compute with the stored 8-bit floats; None if they can.

    An empty string means that no note is needed.
    """
    if not packing.floats:
        return "products have a scale for an output, not for a block" if packing.block[0] > 1 else ""
    if config.dtype not in ("auto", "bfloat16"):
        return f"products are of bfloat16, not of {config.dtype}"
    return backend.float8_refusal()


def hidden_refusal(config: EngineConfig, spec: ModelShape) -> str | None:
    """Return why requests cannot run from hidden state; None if they can; empty without `--hidden-cache`."""
    if not config.hidden_cache:
        return ""
    if not isinstance(spec, ModelSpec):
        return "transformers' modules keep the hidden state of their layers to themselves"
    return hidden_offer(spec).refusal or None
