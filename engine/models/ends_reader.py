"""Reads what transformers' modules compute in front of their decoder layers and behind them, so that all of a step can
be one tape.

A forward pass in which every part gives random values: what the next part is given then shows what was made of them,
to the last bit. In front that is an embedding, perhaps scaled, and angles of rotations; behind the last layer a norm, a
head, and what becomes of its outputs. Of anything else nothing is known, and the modules run. Names say nothing here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.models.known_layers import NormForm, RunLayer, rotation_of
from engine.models.layer_reader import copy_of
from engine.models.norm_reader import UnknownError, floats, is_bare_norm, read_norm

_LARGE = 40.0  # random outputs of a head: where a cap matters
_ENDS = 3  # parts: embedding, norm, head


@dataclass(frozen=True, eq=False)
class Angles:
    """Cosines and sines of positions times `frequencies` [r / 2], float32, all times `scaling`."""

    frequencies: Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Ends:
    """What is around the decoder layers, by the names of its modules. The embedding times `embedding_scale`; of each
    layer its `angles`; the logits are the head's outputs times `logit_scale`, capped by `softcap` if that is not 0."""

    embedding: str
    embedding_scale: float
    angles: tuple[Angles | None, ...]
    norm: NormForm
    head: str
    logit_scale: float
    softcap: float


Forward = Callable[[Tensor, Tensor, Tensor, RunLayer], Tensor]
"""(token ids [T], positions [T], which are sampled [S], what runs the decoder layers) -> logits [S, vocab]."""


def read_ends(model: nn.Module, linear: type[nn.Module], forward: Forward, positions: Tensor, layers: int) -> Ends:
    """What is in front of and behind so many decoder layers, tried at these positions [T]. Raises UnknownError."""
    generator = torch.Generator().manual_seed(3)
    embedding: Any = getattr(model, "get_input_embeddings")()  # noqa: B009 - an Any
    ids = torch.randint(len(embedding.weight), positions.shape, generator=generator)
    keep = torch.tensor([1, len(positions) - 1])
    seen = _Seen(generator)
    with seen.watching(model, linear, embedding.weight.shape[1]):
        try:
            logits = forward(ids, positions, keep, seen.layer)
        except UnknownError:
            raise
        except Exception as error:  # of somebody else's code
            raise UnknownError(f"it does not run on random values: {error}") from None
    if [each.number for each in seen.layers] != list(range(layers)) or len(seen.parts) != _ENDS:
        raise UnknownError("other parts are in front of its layers or behind them")
    first, last, head = seen.parts
    angles = _AngleReader(model, positions)
    if first.module is not embedding or not seen.layers[0].after == 1 == seen.layers[-1].after:
        raise UnknownError("its parts come in another order")
    norm = _norm_of(last, linear, seen.layers[-1].output)
    if not isinstance(head.module, linear) or not any(
        _equal(head.input, rows) for rows in (last.output, last.output[:, keep])
    ):
        raise UnknownError("its head is given something else than the norm of its last layer")
    kept = head.output[0] if head.output.shape[1] == len(keep) else head.output[0][keep]
    numbers = list(dict.fromkeys(number for each in model.modules() for number in (*floats(each), *_settings(each))))
    scale, cap = _logits_of(kept, logits, numbers)
    return Ends(
        first.name, _embedding_scale(first, seen.layers[0].x, ids, numbers),
        tuple(angles.of(each.others) for each in seen.layers), norm, head.name, scale, cap,
    )  # fmt: skip


class _Part(NamedTuple):
    """A call of a module with weights: what it was given, what it made of that, and what it was said to give."""

    name: str
    module: Any
    input: Tensor
    made: Tensor
    output: Tensor


class _Layer(NamedTuple):
    """A call of a decoder layer. `after`: so many parts."""

    number: int
    x: Tensor
    others: Mapping[str, Any]
    output: Tensor
    after: int


@dataclass
class _Seen:
    """A forward pass in which no part's values are its own."""

    generator: torch.Generator
    layers: list[_Layer] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)

    def layer(self, number: int, _whole: Callable[..., Any], x: Tensor, others: Mapping[str, Any]) -> Tensor:
        """See RunLayer."""
        if self.layers and not _equal(x, self.layers[-1].output):
            raise UnknownError("its layers are not given what the ones before them give")
        output = self._random(x)
        self.layers.append(_Layer(number, x.clone(), others, output, len(self.parts)))
        return output.clone()

    @contextmanager
    def watching(self, model: nn.Module, linear: type[nn.Module], hidden: int) -> Iterator[None]:
        """Notes calls of modules with weights and of norms, and gives random values in the place of theirs."""

        def note(name: str) -> Callable[..., Tensor]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor:
                x = args[0] if args else next(iter(kwargs.values()), None)
                if not isinstance(x, Tensor) or not isinstance(output, Tensor):
                    raise UnknownError(f"{name} takes or gives something else than a tensor")
                given = self._random(output, _LARGE if isinstance(module, linear) else 1.0)
                self.parts.append(_Part(name, module, x.clone(), output.clone(), given))
                return given.clone()

            return hook

        leaves = [
            (name, each)
            for name, each in model.named_modules()
            if isinstance(each, linear) or _is_leaf(each) or is_bare_norm(each, hidden)
        ]
        hooks = [each.register_forward_hook(note(name), with_kwargs=True) for name, each in leaves]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def _random(self, like: Tensor, size: float = 1.0) -> Tensor:
        values = size * torch.randn(like.shape, generator=self.generator)
        return values.to(like.device, like.dtype)


def _is_leaf(module: nn.Module) -> bool:
    return not any(module.children()) and any(True for _ in module.parameters())


def _norm_of(part: _Part, linear: type[nn.Module], x: Tensor) -> NormForm:
    if isinstance(part.module, linear) or not _equal(part.input, x):
        raise UnknownError(f"{part.name} stands where the norm of the last layer is looked for")
    return read_norm(part.name, copy_of(part.module, linear), x.shape[-1])


def _embedding_scale(part: _Part, x: Tensor, ids: Tensor, numbers: list[float]) -> float:
    """What rows of the embedding are multiplied by, in its module or behind it."""
    if not _equal(part.input[0], ids):
        raise UnknownError(f"{part.name} is given something else than tokens")
    rows = part.module.weight[ids][None]
    inside, behind = _factor(rows, part.made, numbers), _factor(part.output, x, numbers)
    if inside is None or behind is None or 1.0 not in (inside, behind):
        raise UnknownError(f"{part.name} is not all that its first layer is given")
    return inside * behind


def _factor(before: Tensor, after: Tensor, numbers: list[float]) -> float | None:
    """By which of the numbers, or by what the type makes of it, one is the other; rounded once."""
    for number in (1.0, *numbers):
        for each in (number, float(torch.tensor(number).to(before.dtype))):
            if _equal((before.float() * each).to(before.dtype), after):
                return each
    return None


def _logits_of(outputs: Tensor, logits: Tensor, numbers: list[float]) -> tuple[float, float]:
    """What the logits are of the head's outputs: by which scale, and which cap."""
    if _equal(outputs, logits):
        return 1.0, 0.0
    for number in numbers:
        if number > 0.0 and _equal(torch.tanh(outputs / number) * number, logits):
            return 1.0, number
        if _equal(outputs * number, logits):
            return number, 0.0
        if number and _equal(outputs / number, logits):
            return 1.0 / number, 0.0
    raise UnknownError("something else becomes of the head's outputs")


class _AngleReader:
    """Finds the frequencies among a model's buffers by which layers' angles are those of the positions [T]."""

    def __init__(self, model: nn.Module, positions: Tensor) -> None:
        self._model, self._positions = model, positions
        self._found: list[tuple[tuple[Tensor, Tensor], Angles]] = []

    def of(self, others: Mapping[str, Any]) -> Angles | None:
        """Of a layer that is given this. Raises UnknownError."""
        given = rotation_of(others)
        if given is None:
            return None
        for before, angles in self._found:
            if all(map(_equal, before, given)):
                return angles
        self._found.append((given, self._search(given)))
        return self._found[-1][1]

    def _search(self, given: tuple[Tensor, Tensor]) -> Angles:
        half, dtype = given[0].shape[2] // 2, given[0].dtype
        for module in self._model.modules():
            for buffer in module.buffers(recurse=False):
                if buffer.dtype != torch.float32 or buffer.shape != (half,):
                    continue
                angles = self._positions[:, None].float() * buffer
                for order in (torch.cat((angles, angles), dim=1), angles.repeat_interleave(2, dim=1)):
                    for scaling in (1.0, *floats(module)):
                        mine = ((each * scaling).to(dtype)[None] for each in (order.cos(), order.sin()))
                        if all(map(_equal, mine, given)):
                            return Angles(buffer.clone(), scaling)
        raise UnknownError("its angles are not those of frequencies that it holds")


def _settings(module: nn.Module) -> list[float]:
    """Numbers of its config."""
    config = getattr(module, "config", None)
    return [float(each) for each in vars(config).values() if type(each) in (int, float)] if config is not None else []


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a.float() == b.float()).all())
