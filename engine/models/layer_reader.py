"""Recognise the computation of a transformers decoder layer, so that native kernels can run it.

A copy of the layer with random float32 weights runs a few tokens, and every tensor between its parts is recorded. The
layer is recognised if each tensor is the result of one known operation on earlier tensors (a norm, a linear layer, a
rotation, an activation, a scaled addition) and no part of the layer remains. Module names are not used. A layer that is
not recognised runs by its modules.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.known_layers import (
    Given,
    LayerForm,
    NormForm,
    Rotation,
    UnknownError,
    floats,
    is_bare_norm,
    read_norm,
    same,
)

Attention = Callable[[nn.Module, Tensor, Tensor, Tensor, Any], Tensor]
Attending = Callable[[Attention, Callable[[], Any]], Any]
"""Runs a callable with this attention in place of that of transformers."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
ROTATIONS = (Rotation(False, False), Rotation(True, False), Rotation(True, True))
_GATES = ("silu", "gelu", "gelu_tanh")
_PLAIN = ("gelu", "gelu_tanh", "relu", "relu2")
_MOST_LINEARS, _MATRIX = 7, 2
_HEADS_FIRST = 4  # dimensions


def read_layer(module: nn.Module, linear: type[nn.Module], given: Given, attending: Attending) -> LayerForm:
    """Return the form of the layer for such arguments. Raises UnknownError.

    `linear` is the type of its linear layers, which have `in_features`, `out_features` and `bias`.
    """
    if given.unknown:
        raise UnknownError(f"it takes the argument {given.unknown}")
    linears = sum(isinstance(each, linear) for each in module.modules())
    experts = any(hasattr(each, "replaced") for each in module.modules())
    if experts or linears > _MOST_LINEARS or any(each.dim() > _MATRIX for each in module.parameters()):
        raise UnknownError("it has too many parts")  # experts, whose copy would be large
    layer = _copy_of(module, linear)
    form = _Matcher(layer, given, _run(layer, given, attending, 1.0)).read()
    if form != _Matcher(layer, given, _run(layer, given, attending, 0.01)).read():  # small values reveal epsilons
        raise UnknownError("it computes something else for small values")
    return form


def _copy_of(module: nn.Module, linear: type[nn.Module]) -> nn.Module:
    """Return a copy of the module with random float32 weights."""
    memo: dict[int, Any] = {id(each.config): each.config for each in module.modules() if hasattr(each, "config")}
    for each in module.modules():
        if isinstance(each, linear):
            found: Any = each
            memo[id(each)] = nn.Linear(found.in_features, found.out_features, found.bias is not None)
    result = copy.deepcopy(module, memo).float()
    generator = torch.Generator().manual_seed(0)
    for each in result.modules():
        each.__dict__.pop("forward", None)  # belongs to the copied module
    with torch.no_grad():
        for parameter in result.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.normal_(0.0, spread, generator=generator)
    return result.eval().requires_grad_(False)


class _Leaf(NamedTuple):
    """A call of a module without child modules."""

    name: str
    module: Any
    input: Tensor
    output: Tensor

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear)


class _Queries(NamedTuple):
    """Linear layers of q, k and v, norms and rotation of q and k, and whether the rotation comes first."""

    linear: tuple[str, ...]
    norms: tuple[NormForm, NormForm] | None
    rotation: Rotation | None
    norms_last: bool


@dataclass
class _Notes:
    """Record of one run of a layer: calls of its parts in order, before and after attention."""

    x: Tensor
    before: list[_Leaf] = field(default_factory=list)
    after: list[_Leaf] = field(default_factory=list)
    qkv: tuple[Tensor, Tensor, Tensor] | None = None
    attended: Tensor | None = None
    y: Any = None


def _run(layer: nn.Module, given: Given, attending: Attending, size: float) -> _Notes:
    """Run the layer on random tokens of this magnitude; attention returns random values."""
    generator = torch.Generator().manual_seed(1)
    x = size * torch.randn(given.x.shape, generator=generator)
    notes = _Notes(x.clone())

    def attention(_module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _manner: Any) -> Tensor:
        if notes.qkv is not None:
            raise UnknownError("it attends more than once")
        notes.qkv = q.clone(), k.clone(), v.clone()
        notes.attended = torch.randn(len(q), q.shape[1] * v.shape[2], generator=generator)
        return notes.attended.clone()

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(x, Tensor) and isinstance(output, Tensor):
                leaf = _Leaf(name, module, x.clone(), output.clone())  # clones, to detect changes in place
                (notes.before if notes.qkv is None else notes.after).append(leaf)

        return hook

    leaves = [(name, each) for name, each in layer.named_modules() if not any(each.children())]
    hooks = [each.register_forward_hook(note(name), with_kwargs=True) for name, each in leaves]
    try:
        notes.y = attending(attention, lambda: layer(hidden_states=x, **_widened(given)))
    except UnknownError:
        raise
    except Exception as error:  # third-party code
        raise UnknownError(f"a copy of it does not run: {error}") from None
    finally:
        for each in hooks:
            each.remove()
    if not isinstance(notes.y, Tensor) or notes.qkv is None:
        raise UnknownError("it does not attend, or returns more than the hidden state")
    return notes


def _widened(given: Given) -> dict[str, Any]:
    def wide(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(wide(each) for each in value)
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: wide(each) for name, each in given.others.items()}


class _Matcher:
    """Matches one run against the known operations, part by part."""

    def __init__(self, layer: nn.Module, given: Given, notes: _Notes) -> None:
        self._layer = layer
        cos, sin = given.rotation or (None, None)
        self._rotation = None if cos is None or sin is None else (cos.float()[0], sin.float()[0])
        self._notes = notes
        self._before = [leaf for leaf in notes.before if _does_something(leaf)]
        self._after = [leaf for leaf in notes.after if _does_something(leaf)]
        self._used: list[_Leaf] = []

    def read(self) -> LayerForm:
        notes = self._notes
        assert notes.attended is not None
        input_norm, normed = self._norm_of(self._before, notes.x)
        queries = self._queries(normed)
        out = self._linear(self._after, notes.attended)
        attention_norm, branch = self._norm_of(self._after, out.output)
        scale, middle = self._middle(branch)
        seen = self._after[0].input if self._after else notes.x
        parallel = not same(seen, middle) and (same(seen, notes.x) or same(seen, normed))
        mlp_norm, rows = (None, normed) if same(seen, normed) and parallel else self._norm_of(self._after, seen)
        up, gated, activation, down = self._mlp(rows)
        down_norm, result = self._norm_of(self._after, down.output)
        total = middle + scale * result
        if (not parallel and not same(seen, middle)) or not same(notes.y, total):
            raise UnknownError("it adds its branches in another way")
        self._check_rest()
        return LayerForm(
            input_norm, queries.linear, queries.norms, queries.rotation, out.name, attention_norm, parallel, mlp_norm,
            up, gated, activation, down.name, down_norm, scale, queries.norms_last,
        )  # fmt: skip

    def _take(self, leaves: list[_Leaf]) -> _Leaf:
        self._used.append(leaves[0])
        return leaves.pop(0)

    def _linear(self, leaves: list[_Leaf], x: Tensor) -> _Leaf:
        """Take the next part, which must be a linear layer of x."""
        if not leaves or not leaves[0].is_linear or not same(leaves[0].input, x):
            found = leaves[0].name if leaves else "nothing"
            raise UnknownError(f"found {found} in place of a linear layer")
        return self._take(leaves)

    def _norm_of(self, leaves: list[_Leaf], x: Tensor) -> tuple[NormForm | None, Tensor]:
        """Take the next part if it is a norm of x and return it with its output; else return None and x."""
        if not leaves or leaves[0].is_linear or not same(leaves[0].input, x):
            return None, x
        leaf = self._take(leaves)
        return read_norm(leaf.name, leaf.module, x.shape[-1]), leaf.output

    def _queries(self, x: Tensor) -> "_Queries":
        assert self._notes.qkv is not None
        q, k, v = self._notes.qkv
        linear = [leaf for leaf in self._before if leaf.is_linear]
        norms = [leaf for leaf in self._before if not leaf.is_linear]
        sizes = [each.shape[1] * each.shape[2] for each in (q, k, v)]
        rows = [self._linear([leaf], x).output.reshape(len(q), -1) for leaf in linear]
        widths = [each.shape[1] for each in rows]
        if widths not in (sizes, [sum(sizes)]) or len(norms) not in (0, 2):
            raise UnknownError("it computes queries, keys and values in another way")
        mine, self._before = list(torch.split(torch.cat(rows, dim=1), sizes, dim=1)), []
        normed = [self._norm_of_heads(leaf, mine[place], (q, k)[place]) for place, leaf in enumerate(norms)]
        mine[: len(normed)] = [rows for _, rows, _ in normed]
        if not same(v.reshape(len(v), -1), mine[2]):
            raise UnknownError("values are not the output of a linear layer")
        behind = {self._turned(each, mine[place].view(each.shape)) for place, each in enumerate((q, k))}
        in_front = {turned for _, _, turned in normed} or {None}
        forms = [form for form, _, _ in normed]
        if len(behind) != 1 or len(in_front) != 1 or len({form.heads for form in forms}) > 1:
            raise UnknownError("queries and keys differ in norm or rotation")
        first, last = in_front.pop(), behind.pop()
        if first is not None and last is not None:
            raise UnknownError("queries and keys are rotated twice")
        names, pair = tuple(leaf.name for leaf in linear), (forms[0], forms[1]) if forms else None
        return _Queries(names, pair, last if first is None else first, first is not None)

    def _norm_of_heads(self, leaf: _Leaf, rows: Tensor, x: Tensor) -> tuple[NormForm, Tensor, Rotation | None]:
        """Return the norm of queries or keys `rows` [T, heads * d], its output, and the rotation applied before it.

        `x` [T, heads, d] has their shape.
        """
        swaps = {False: leaf.input.reshape(len(rows), -1)}
        if leaf.input.dim() == _HEADS_FIRST:  # heads may come before tokens
            swaps[True] = _swapped(leaf.input)
        turned = self._turns(rows.view(x.shape))
        found = next(
            (
                (each, is_swapped)
                for each, want in turned
                for is_swapped, given in swaps.items()
                if same(given, want.reshape(len(rows), -1))
            ),
            None,
        )
        if found is None:
            raise UnknownError(f"{leaf.name} normalises something else")
        width = leaf.input.shape[-1]
        if width not in (rows.shape[1], x.shape[2]):
            raise UnknownError(f"{leaf.name} is a norm of {width} elements")
        form = read_norm(leaf.name, self._take([leaf]).module, width)
        output = _swapped(leaf.output) if found[1] else leaf.output.reshape(len(rows), -1)
        return replace(form, heads=width != rows.shape[1]), output, found[0]

    def _turns(self, x: Tensor) -> list[tuple[Rotation | None, Tensor]]:
        """Return x [T, heads, d] without and with each known rotation."""
        if self._rotation is None:
            return [(None, x)]
        return [(None, x), *((each, rotated(x, each, *self._rotation)) for each in ROTATIONS)]

    def _turned(self, found: Tensor, mine: Tensor) -> Rotation | None:
        for rotation, turned in self._turns(mine):
            if same(found, turned):
                return rotation
        raise UnknownError("queries or keys are rotated in another way")

    def _middle(self, branch: Tensor) -> tuple[float, Tensor]:
        """Return the factor of a branch, and the hidden state after the first branch."""
        x = self._notes.x
        for scale in (1.0, *floats(self._layer)):
            middle = x + scale * branch.view(x.shape)
            if self._after and same(self._after[0].input, middle):
                return scale, middle
        return 1.0, x + branch.view(x.shape)

    def _mlp(self, x: Tensor) -> tuple[tuple[str, ...], bool, str, _Leaf]:
        """Return the up layers (gate first), whether there is a gate, the activation, and the down layer."""
        first = self._linear(self._after, x)
        second = self._linear(self._after, x) if len(self._after) > 1 and same(self._after[0].input, x) else None
        if not self._after or not self._after[0].is_linear:
            raise UnknownError("its MLP is unknown")
        down = self._take(self._after)
        inner = down.input.reshape(-1, down.input.shape[-1])
        rows = [leaf.output.reshape(len(inner), -1) for leaf in (first, second) if leaf is not None]
        if second is None and rows[0].shape[1] == 2 * inner.shape[1]:
            rows = list(rows[0].chunk(2, dim=1))
        names = (first.name,) if second is None else (first.name, second.name)
        if len(rows) == 1:
            act = next((name for name in _PLAIN if same(inner, ACTIVATIONS[name](rows[0]))), None)
            if act is not None:
                return names, False, act, down
            raise UnknownError("its activation is unknown")
        for gate, up, order in ((rows[0], rows[1], names), (rows[1], rows[0], names[::-1])):
            found = next((name for name in _GATES if same(inner, ACTIVATIONS[name](gate) * up)), None)
            if found is not None and (order == names or second is not None):
                return order, True, found, down
        raise UnknownError("its activation is unknown")

    def _check_rest(self) -> None:
        rest = [*self._before, *self._after]
        if rest:
            raise UnknownError(f"{rest[0].name} is not part of a known layer")
        names = [leaf.name for leaf in self._used]
        if len(set(names)) != len(names):
            raise UnknownError("a part is called twice")
        owned = {f"{leaf.name}.{name}" for leaf in self._used for name, _ in leaf.module.named_parameters()}
        held = {name for name, _ in self._layer.named_parameters()}
        if held - owned:
            raise UnknownError(f"{min(held - owned)} is not part of a known layer")


def _swapped(x: Tensor) -> Tensor:
    """Reorder x [1, heads, T, d] to [T, heads * d]."""
    return x[0].transpose(0, 1).flatten(1)


def rotated(x: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r elements of each head of x [T, heads, d]; cos, sin [T, r]."""
    width, (cos, sin) = cos.shape[-1], (rotation.once(each)[:, None] for each in (cos, sin))
    part, rest = x[..., :width], x[..., width:]
    first, second = (part[..., ::2], part[..., 1::2]) if rotation.pairs else part.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if rotation.pairs else torch.cat(turned, dim=-1)
    return torch.cat((joined, rest), dim=-1)


def _does_something(leaf: _Leaf) -> bool:
    """Return whether the part has weights or is a norm; other parts are recognised by their results."""
    has_weights = any(True for _ in leaf.module.parameters())
    return has_weights or is_bare_norm(leaf.module, leaf.input.shape[-1])
