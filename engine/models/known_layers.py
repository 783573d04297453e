"""Replaceable decoder layers of transformers modules: interception of their calls, the form of a layer that
`engine.models.layer_reader` has recognised, and the norm of a module, recognised by trials on random rows.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

RunLayer = Callable[[int, Callable[..., Any], Tensor, Mapping[str, Any]], Any]
"""(index among the attention layers, layer, hidden state [1, T, H], other arguments) -> output of the layer."""

LAYERS: ContextVar[RunLayer | None] = ContextVar("function that runs the decoder layers of this pass", default=None)

_PLAIN = (type(None), bool, int, float, str)
_POSITIONS = {"position_ids", "cache_position"}
_ROTATION = "position_embeddings"


@dataclass(frozen=True, slots=True)
class NormForm:
    """A norm, identified by the name of its module.

    Attributes:
        layer: Layer norm (subtracts the mean) instead of RMS norm.
        centered: The weight is stored minus 1.
        once: The result is rounded only after the weight.
        heads: The norm applies to each head separately.
        bare: Number of elements of a norm without a weight; else 0.
    """

    name: str
    eps: float
    layer: bool
    centered: bool
    once: bool
    heads: bool = False
    bare: int = 0

    def constants(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias (None for an RMS norm) of the module in float32."""
        if self.bare:
            return torch.ones(self.bare), torch.zeros(self.bare) if self.layer else None
        stored, bias = getattr(module, "weight"), getattr(module, "bias", None)  # noqa: B009 - an Any
        weight: Tensor = (stored.float() + 1.0 if self.centered else stored.float()).contiguous()
        if not self.layer:
            return weight, None
        return weight, weight.new_zeros(weight.shape) if bias is None else bias.float().contiguous()


class Rotation(NamedTuple):
    """Layout of a rotary embedding.

    Attributes:
        pairs: Adjacent elements of a head are rotated together, instead of its halves.
        doubled: Cosines and sines of a frequency are adjacent, instead of the whole table being repeated.
    """

    pairs: bool
    doubled: bool

    def once(self, values: Tensor) -> Tensor:
        """Return one value per frequency, [..., r / 2], of cosines or sines [..., r]."""
        return values[..., ::2] if self.doubled else values[..., : values.shape[-1] // 2]


@dataclass(frozen=True, slots=True)
class LayerForm:
    """A decoder layer, by the names of its modules.

    Attributes:
        qkv: One linear layer or three.
        parallel: Both branches read the layer's input.
        mlp_norm: Norm before the MLP. None with `parallel`: the MLP reads the normalised input of attention.
        up: One linear layer (outputs of the gate first) or two (gate first); one if not `gated`.
        scale: Factor of a branch before it is added.
        qk_norms_last: Norms of queries and keys follow the rotation.
    """

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
    """Arguments of a decoder layer in a forward pass.

    Attributes:
        x: Hidden state [1, T, H].
        others: Other arguments by name.
        follows: Whether x is the unmodified output of the preceding layer.
    """

    x: Tensor
    others: Mapping[str, Any]
    follows: bool

    @property
    def rotation(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [1, T, r], or None."""
        return rotation_of(self.others)

    @property
    def unknown(self) -> str:
        """Name of another argument that may matter; empty if there is none."""
        others = {name: each for name, each in self.others.items() if name not in _POSITIONS}
        if self.rotation is not None:
            del others[_ROTATION]
        return min((name for name, each in others.items() if not isinstance(each, _PLAIN)), default="")


def rotation_of(others: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines [1, T, r] among the arguments of a layer, or None."""
    found = others.get(_ROTATION)
    if not isinstance(found, tuple) or len(found) != 2:
        return None
    cos, sin = found
    return (cos, sin) if isinstance(cos, Tensor) and cos.dim() == 3 and len(cos) == 1 else None


def take_over(module: nn.Module, layer: int) -> None:
    """Redirect calls of the module to the function in `LAYERS`, if set."""
    whole: Callable[..., Any] = module.forward
    signature = inspect.signature(whole)

    def forward(*args: Any, **kwargs: Any) -> Any:
        run = LAYERS.get()
        if run is None:
            return whole(*args, **kwargs)
        if len(args) == 1 and "hidden_states" not in kwargs:  # fast path, the usual case
            return run(layer, whole, args[0], kwargs)
        given = signature.bind(*args, **kwargs).arguments
        x, others = given.pop("hidden_states"), given.pop("kwargs", {})
        return run(layer, whole, x, given | others)

    module.forward = forward


def layer_of(model: nn.Module, name: str) -> str | None:
    """Return the name of the decoder layer that contains the module: an element of a module list that takes hidden
    states. None if there is none."""
    above = name.rpartition(".")[0]
    while above:
        parent = above.rpartition(".")[0]
        if isinstance(model.get_submodule(parent), nn.ModuleList):
            takes = inspect.signature(model.get_submodule(above).forward).parameters
            return above if next(iter(takes), "") == "hidden_states" else None
        above = parent
    return None


def observe(forward: Callable[[], object]) -> dict[int, Given]:
    """Return the arguments of each layer in a forward pass."""
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


_CLOSE = 3e-5  # relative to the largest value: float32 sums in another order
_MOST_EPSILON = 0.1
_USUAL = (1e-5, 1e-6, 1e-8, 1e-12)  # candidates for a module without a weight that does not hold its epsilon


class UnknownError(Exception):
    """A module's computation is not recognized; the message describes the computation."""


def read_norm(name: str, module: Any, width: int) -> NormForm:
    """Return the norm of `width` elements that the module computes, with or without weight. Raises UnknownError."""
    weight = getattr(module, "weight", None)
    if any(True for _ in module.parameters()) and (not isinstance(weight, Tensor) or weight.shape != (width,)):
        raise UnknownError(f"{name} is not a norm of {width} elements with a weight")
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(2))
    rows *= torch.tensor([[1e-3], [1.0], [30.0]])
    expected = module(rows)
    if not isinstance(expected, Tensor) or expected.shape != rows.shape:
        raise UnknownError(f"{name} is not a norm")
    for form in _norm_forms(name, module, width):
        if all(same(mine, each) for mine, each in zip(norm(form, module, rows), expected, strict=True)):
            return _with_rounding(form, module, rows)
    raise UnknownError(f"{name} is an unknown norm")


def norm(form: NormForm, module: nn.Module, x: Tensor) -> Tensor:
    """Compute the norm of x in float32; for an RMS norm in 16 bits, rounded as the form says."""
    weight, bias = form.constants(module)
    wide = x.float()
    if form.layer:
        return functional.layer_norm(wide, weight.shape, weight, bias, form.eps).to(x.dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + form.eps)
    return ((normed if form.once else normed.to(x.dtype).float()) * weight).to(x.dtype)


def is_bare_norm(module: nn.Module, width: int) -> bool:
    """Return whether the module is a norm of `width` elements without a weight."""
    if any(module.children()) or any(True for _ in module.parameters()):
        return False
    try:
        read_norm("", module, width)
    except Exception:
        return False
    return True


def _norm_forms(name: str, module: nn.Module, width: int) -> Iterator[NormForm]:
    bare = 0 if any(True for _ in module.parameters()) else width
    for eps in (each for each in (*floats(module), *(_USUAL if bare else ())) if 0 <= each < _MOST_EPSILON):
        for layer in (False, True):
            if layer or getattr(module, "bias", None) is None:
                for centered in (False,) if bare else (False, True):
                    yield NormForm(name, eps, layer, centered, once=False, bare=bare)


def _with_rounding(form: NormForm, module: nn.Module, rows: Tensor) -> NormForm:
    """Return the form with the rounding that the module applies in 16 bits."""
    narrow, few = copy.deepcopy(module).to(torch.bfloat16), rows.to(torch.bfloat16)
    expected = narrow(few)
    forms = [replace(form, once=once) for once in (False, True)]
    return max(forms, key=lambda each: int((norm(each, narrow, few) == expected).sum()))


def floats(module: nn.Module) -> list[float]:
    """Return the distinct float attributes of the module."""
    return list(dict.fromkeys(each for each in vars(module).values() if isinstance(each, float)))


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether the tensors agree within float32 rounding, regardless of leading dimensions."""
    if a.numel() != b.numel() or a.shape[-1] != b.shape[-1]:
        return False
    a, b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    return bool((a - b).abs().max() <= _CLOSE * b.abs().max())
