"""Decoder layers of transformers' modules that others may run in their place: how one is called, and what a layer that
`engine.models.layer_reader` has read computes. Knows nothing of kernels, caches or steps.
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

RunLayer = Callable[[int, Callable[..., Any], Tensor, Mapping[str, Any]], Any]
"""(which of the layers that attend, the layer, its hidden state [1, T, H], what else it is given) -> what it gives."""

LAYERS: ContextVar[RunLayer | None] = ContextVar("who runs the decoder layers of this forward pass", default=None)

_PLAIN = (type(None), bool, int, float, str)
_POSITIONS = {"position_ids", "cache_position"}
_ROTATION = "position_embeddings"


@dataclass(frozen=True, slots=True)
class NormForm:
    """A norm by its module's name. `centered`: the weight is stored without 1; `once`: it is rounded behind the weight
    alone; `layer`: a mean is subtracted; `heads`: it is of each head alone; `bare`: of so many elements, without
    a weight."""

    name: str
    eps: float
    layer: bool
    centered: bool
    once: bool
    heads: bool = False
    bare: int = 0

    def constants(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Weight and, of a layer norm, bias, in float32, of the module that has them."""
        if self.bare:
            return torch.ones(self.bare), torch.zeros(self.bare) if self.layer else None
        stored, bias = getattr(module, "weight"), getattr(module, "bias", None)  # noqa: B009 - an Any
        weight: Tensor = (stored.float() + 1.0 if self.centered else stored.float()).contiguous()
        if not self.layer:
            return weight, None
        return weight, weight.new_zeros(weight.shape) if bias is None else bias.float().contiguous()


class Rotation(NamedTuple):
    """How the elements of a head are turned: halves against each other, or `pairs` that lie side by side; and whether a
    frequency's cosines, and sines, come side by side (`doubled`), or all of them twice."""

    pairs: bool
    doubled: bool

    def once(self, values: Tensor) -> Tensor:
        """Of cosines or sines [..., r] one for each frequency, [..., r / 2]."""
        return values[..., ::2] if self.doubled else values[..., : values.shape[-1] // 2]


@dataclass(frozen=True, slots=True)
class LayerForm:
    """A decoder layer, by the names of its modules. `qkv`: one linear layer or three; `up`: one (a gate's outputs
    first) or two (the gate first), or, not `gated`, one; `parallel`: both branches see the layer's input, and the MLP
    that of attention if `mlp_norm` is None; `scale`: what a branch is multiplied by before it is added;
    `qk_norms_last`: norms on queries and keys see them turned."""

    input_norm: NormForm | None
    qkv: tuple[str, ...]
    qk_norms: tuple[NormForm, NormForm] | None
    rotation: Rotation | None
    out: str
    attention_norm: NormForm | None
    parallel: bool
    mlp_norm: NormForm | None
    up: tuple[str, ...]
    gated: bool
    activation: str
    down: str
    down_norm: NormForm | None
    scale: float
    qk_norms_last: bool = False

    @property
    def linear(self) -> tuple[str, ...]:
        return (*self.qkv, self.out, *self.up, self.down)

    @property
    def norms(self) -> list[NormForm]:
        found = (self.input_norm, *(self.qk_norms or ()), self.attention_norm, self.mlp_norm, self.down_norm)
        return [norm for norm in found if norm is not None]


class Given(NamedTuple):
    """What a layer of a forward pass is given: hidden state [1, T, H] and others. `follows`: the hidden state is what
    the layer before it gave, as it was."""

    x: Tensor
    others: Mapping[str, Any]
    follows: bool

    @property
    def rotation(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [1, T, r]."""
        return rotation_of(self.others)

    @property
    def unknown(self) -> str:
        """What else comes that may matter; empty where nothing does."""
        others = {name: each for name, each in self.others.items() if name not in _POSITIONS}
        if self.rotation is not None:
            del others[_ROTATION]
        return min((name for name, each in others.items() if not isinstance(each, _PLAIN)), default="")


def rotation_of(others: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [1, T, r] among what a layer is given."""
    found = others.get(_ROTATION)
    if not isinstance(found, tuple) or len(found) != 2:
        return None
    cos, sin = found
    return (cos, sin) if isinstance(cos, Tensor) and cos.dim() == 3 and len(cos) == 1 else None


def take_over(module: nn.Module, layer: int) -> None:
    """From now on the module is run as `LAYERS` says, where that says anything; else it runs as it was."""
    whole: Callable[..., Any] = module.forward
    signature = inspect.signature(whole)

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = LAYERS.get()
        if run is None:
            return whole(*args, **kwargs)
        if len(args) == 1 and "hidden_states" not in kwargs:  # nearly always, and in a fraction of the time
            return run(layer, whole, args[0], kwargs)
        given = signature.bind(*args, **kwargs).arguments
        x, others = given.pop("hidden_states"), given.pop("kwargs", {})
        return run(layer, whole, x, given | others)

    module.forward = forward


def layer_of(model: nn.Module, name: str) -> str | None:
    """The decoder layer that the module of this name is in: what a list of modules holds and takes hidden state."""
    above = name.rpartition(".")[0]
    while above:
        parent = above.rpartition(".")[0]
        if isinstance(model.get_submodule(parent), nn.ModuleList):
            takes = inspect.signature(model.get_submodule(above).forward).parameters
            return above if next(iter(takes), "") == "hidden_states" else None
        above = parent
    return None


def observe(forward: Callable[[], object]) -> dict[int, Given]:
    """What each layer is given in a forward pass."""
    seen: dict[int, Given] = {}
    last: Any = None
    kept: Any = None

    def run(index: int, whole: Callable[..., Any], x: Tensor, others: Mapping[str, Any]) -> Any:
        nonlocal last, kept
        seen[index] = Given(x, others, x is last and torch.equal(x, kept))
        last = whole(hidden_states=x, **others)
        kept = last.clone() if isinstance(last, Tensor) else None
        return last

    token = LAYERS.set(run)
    try:
        forward()
    finally:
        LAYERS.reset(token)
    return seen
