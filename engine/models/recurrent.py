"""Recurrent layers of transformers modules, with a state of fixed size per request: short convolutions, gated delta
nets, state space models.

Such a module runs the tokens of one request in order and takes its state from a cache of transformers. Here it is
called with a part of a step and a `RecurrentState` in place of that cache. The caller splits the step and stores the
states (`Recur`). A module that needs more of its cache than a `RecurrentState` offers is refused.
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import ModelLoadError

Part = tuple[str, int]
"""Kind and number of a state of a layer: ("conv" or "recurrent", the module's own number for it)."""

Call = Callable[[Tensor, "RecurrentState"], Tensor]
"""x [n, t, hidden] of n requests, and their states, which are updated -> [n, t, hidden]."""

Recur = Callable[[int, Call, Tensor], Tensor]
"""(index of the recurrent layer, its call, x [1, T, hidden] of all tokens of a step) -> [1, T, hidden]."""

STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Names in transformers of layer types with a state."""

_CACHES = ("cache_params", "cache", "past_key_values")
_IGNORED = {"position_ids", "position_embeddings", "cache_position"}


class LayerState(NamedTuple):
    """States of one request [1, ...]. `resumes`: the layer can continue from them with several tokens at once; else it
    takes tokens one at a time."""

    parts: Mapping[Part, Tensor]
    resumes: bool


RECUR: ContextVar[Recur | None] = ContextVar("function that runs the recurrent layers of this pass", default=None)


class RecurrentState:
    """States of n requests in one layer, with the cache interface that transformers modules use.

    `parts` ([n, ...] each) hold the updated states after the layer has run. Without `parts`, the requests begin.
    """

    def __init__(self, parts: Mapping[Part, Tensor] | None = None) -> None:
        self.parts: dict[Part, Tensor] = dict(parts or {})
        self._goes_on = parts is not None

    def get_conv_state(self, *_layer: int, state_idx: int = 0, **_others: Any) -> Tensor | None:
        return self.parts["conv", state_idx] if self._goes_on else None

    def get_recurrent_state(self, *_layer: int, state_idx: int = 0, **_others: Any) -> Tensor | None:
        return self.parts["recurrent", state_idx] if self._goes_on else None

    def update_conv_state(
        self, x: Tensor, *_layer: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_others: Any
    ) -> Tensor:
        """Return the input x [n, channels, t] extended by the past, and store its last `conv_kernel_size` columns."""
        if conv_kernel_size is None:
            raise ModelLoadError("its recurrent layers do not pass conv_kernel_size, the length of their past")
        if self._goes_on:
            x = torch.cat((self.parts["conv", state_idx], x), dim=-1)
        elif x.shape[-1] < conv_kernel_size:
            x = nn.functional.pad(x, (conv_kernel_size - x.shape[-1], 0))
        self.parts["conv", state_idx] = x[..., -conv_kernel_size:]
        return x

    def update_recurrent_state(self, state: Tensor, *_layer: int, state_idx: int = 0, **_others: Any) -> Tensor:
        self.parts["recurrent", state_idx] = state
        return state

    def is_recording_past(self, *_layer: int, **_others: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise ModelLoadError(f"its recurrent layers use the unknown cache attribute {name}")


def candidates(model: nn.Module, layers: set[int], attending: set[int]) -> dict[str, nn.Module]:
    """Return modules of these layers, by name, that take a cache, do not attend (`attending`: ids of those that do) and
    contain no other module that takes one."""
    takers = {name: module for name, module in model.named_modules() if name and _cache_name(module) is not None}
    return {
        name: module
        for name, module in takers.items()
        if getattr(module, "layer_idx", None) in layers
        and id(module) not in attending
        and not any(other.startswith(f"{name}.") for other in takers)
    }


def take_over(module: nn.Module, layer: int) -> None:
    """Redirect calls of the module to the function in `RECUR`, if set."""
    whole: Callable[..., Any] = module.forward
    signature, cache = inspect.signature(whole), _cache_name(module)
    assert cache is not None

    def forward(*args: Any, **kwargs: Any) -> Any:
        recur = RECUR.get()
        if recur is None:
            return whole(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        x, extra = given.pop("hidden_states"), given.pop("kwargs", {})
        given.pop(cache, None)
        passed = given | {name: each for name, each in extra.items() if name not in _IGNORED}
        foreign = sorted(name for name, each in passed.items() if isinstance(each, Tensor | tuple))
        if foreign:
            raise ModelLoadError(f"its recurrent layers take {foreign[0]}, which cannot be split by request")

        def call(part: Tensor, past: RecurrentState) -> Tensor:
            output = whole(hidden_states=part, **{cache: past}, **passed)
            if not isinstance(output, Tensor):
                raise ModelLoadError("its recurrent layers return more than the new hidden state")
            return output

        return recur(layer, call, x)

    module.forward = forward


def resumes(call: Call, x: Tensor, parts: Mapping[Part, Tensor]) -> bool:
    """Return whether the output for several tokens x [1, t, hidden] depends on the recurrent state `parts`; Mamba 1 in
    transformers ignores it and begins anew."""
    other = {part: state + 1 if part[0] == "recurrent" else state for part, state in parts.items()}
    if all(part[0] == "conv" for part in parts):
        return True
    return not torch.equal(call(x, RecurrentState(parts)), call(x, RecurrentState(other)))


def begin(layer: int, call: Call, x: Tensor) -> Tensor:
    """Run a step of first tokens without keeping their states; a `Recur`."""
    del layer
    return call(x, RecurrentState())


def _cache_name(module: nn.Module) -> str | None:
    names = inspect.signature(module.forward).parameters
    if "hidden_states" not in names:
        return None
    return next((name for name in _CACHES if name in names), None)
