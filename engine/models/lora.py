"""LoRA adapters (Hu et al. 2021) in the format of peft, added to unmodified weights: y = W x + s · B (A x).

An adapter is planned from its config and the header of its file, so that unsupported adapters are refused before any
weight is loaded. The modules of a fused projection (q, k and v; gate and up) become one pair: stacked A, block-diagonal
B with the scale included. A step gathers the rows of each of its adapters, over all requests; rows without an adapter
are not touched.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from engine.arrays import IntArray
from engine.config import NamedFolder
from engine.errors import ModelLoadError
from engine.models.linear import Linear
from engine.models.spec import ModelShape, ModelSpec, read_json
from engine.models.stored_tensors import read_header
from engine.models.weights import LayerWeights, split_over, straighten

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq")
"""Initialisations that also modify the base model's weights."""
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "trainable_token_indices": "embeddings of its own (trainable_token_indices)",
    "layer_replication": "layers that repeat (layer_replication)",
    "target_parameters": "parameters that are no layers (target_parameters)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "arrow_config": "a router (arrow_config)",
    "use_bdlora": "block-diagonal matrices (use_bdlora)",
}  # fmt: skip


class Site(NamedTuple):
    """The output to which a delta is added: a matrix of a layer, by its field in LayerWeights, or a module of
    transformers, by its name."""

    layer: int
    slot: str


class Slot(NamedTuple):
    """A module's part of a fused matrix: outputs [first, first + size) of `total`, from `width` inputs."""

    name: str
    first: int
    size: int
    total: int
    width: int


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """An adapted module with A [rank, width] and B [size, rank], named `module` in the file; `scale` multiplies B A."""

    module: str
    slot: Slot
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Modules to load from an adapter; `parts` are in the order of their outputs."""

    name: str
    folder: Path
    parts: Mapping[Site, tuple[AdaptedModule, ...]]

    @property
    def num_parameters(self) -> int:
        """Number of elements in memory, including the zeros off the diagonal."""
        return sum(
            sum(part.rank for part in parts) * (parts[0].slot.width + parts[0].slot.total)
            for parts in self.parts.values()
        )

    @property
    def rank(self) -> int:
        return max(part.rank for parts in self.parts.values() for part in parts)

    def __str__(self) -> str:
        kinds = sorted({part.module.rpartition(".")[2] for parts in self.parts.values() for part in parts})
        return f"rank {self.rank}, {', '.join(kinds)}"


def plan_adapter(given: NamedFolder, spec: ModelShape) -> AdapterPlan:
    """Read an adapter's config and the names and shapes of its tensors.

    Raises ModelLoadError, one line, if files are missing or damaged, the adapter is unsupported or of another model.
    """
    try:
        return _plan(given, spec)
    except ModelLoadError as error:
        raise ModelLoadError(f"adapter {given.name}: {error.message}") from None


def _plan(given: NamedFolder, spec: ModelShape) -> AdapterPlan:
    folder = given.folder
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(f"{folder} has no {CONFIG}: not the folder of an adapter")
    config = read_json(folder / CONFIG)
    _check_config(config)
    if not (folder / TENSORS).is_file():
        raise ModelLoadError(f"{folder} lacks {TENSORS}; weights in other formats are not read")
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in read_header(folder / TENSORS).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelLoadError(f"tensor {name} is not a LoRA matrix of a linear layer; others are not supported")
        halves.setdefault(match["module"], {})[match["half"]] = tensor.shape
    if not halves:
        raise ModelLoadError(f"{folder / TENSORS} is empty")
    parts = dict[Site, list[AdaptedModule]]()
    for module, shapes in halves.items():
        site, slot = _place(module, spec) if isinstance(spec, ModelSpec) else _module(module, shapes)
        parts.setdefault(site, []).append(_part(module, slot, shapes, config))
    ordered = {site: tuple(sorted(parts[site], key=lambda part: part.slot.first)) for site in sorted(parts)}
    return AdapterPlan(given.name, folder, ordered)


def _check_config(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(f"its peft_type is {kind!r}, only LORA is supported")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ModelLoadError(f"adapters with {what} are not supported")
    if (bias := config.get("bias", "none")) != "none":
        raise ModelLoadError(f"adapters with biases (bias={bias!r}) are not supported")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(_CHANGES_WEIGHTS):
        raise ModelLoadError(f"it was made with init_lora_weights={begun!r}, which also changes the base model")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ModelLoadError(f"{CONFIG} must set r and lora_alpha")


def _slots(spec: ModelSpec) -> dict[str, Slot]:
    """Return the linear modules of a layer by name."""
    names, hidden, ffn = spec.family.names, spec.hidden_size, spec.intermediate_size
    fused = (
        ("qkv", names.qkv, split_over(names.qkv, (spec.q_size, spec.kv_size, spec.kv_size)), hidden),
        ("out", (names.out,), (hidden,), spec.q_size),
        ("up", names.up, split_over(names.up, (ffn, ffn) if spec.family.gated_mlp else (ffn,)), hidden),
        ("down", (names.down,), (hidden,), ffn),
    )
    slots = dict[str, Slot]()
    for slot, modules, sizes, width in fused:
        first = 0
        for module, size in zip(modules, sizes, strict=True):
            slots[module] = Slot(slot, first, size, sum(sizes), width)
            first += size
    return slots


def _module(module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Site, Slot]:
    """Return site and slot of a module of a transformers model, which later checks that it exists in this shape."""
    size, width = shapes.get("B", (0,))[0], shapes.get("A", (0,))[-1]
    return Site(0, module), Slot(module, 0, size, size, width)


def _place(module: str, spec: ModelSpec) -> tuple[Site, Slot]:
    slots = _slots(spec)
    for prefix in spec.family.names.prefixes:
        match = _LAYER.fullmatch(module.removeprefix(prefix)) if module.startswith(prefix) else None
        if match is not None and match[2] in slots and int(match[1]) < spec.num_layers:
            slot = slots[match[2]]
            return Site(int(match[1]), slot.name), slot
    raise ModelLoadError(f"it changes {module}, but only these layers can be adapted: {', '.join(slots)}")


def _part(module: str, slot: Slot, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> AdaptedModule:
    rank = int(_by_pattern(config.get("rank_pattern"), module, config["r"]))
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    expected = {"A": (rank, slot.width), "B": (slot.size, rank)}
    for half, shape in expected.items():
        if shapes.get(half) != shape:
            found = "missing" if half not in shapes else list(shapes[half])
            raise ModelLoadError(f"lora_{half} of {module} is {found}, this model and r = {rank} imply {list(shape)}")
    return AdaptedModule(module, slot, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Look up rank_pattern and alpha_pattern like peft: the first pattern that matches the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


@dataclass(frozen=True, slots=True)
class Delta:
    """`a [R, in]` and `b [out, R]`, scale included; R is the sum of the ranks of the site."""

    a: Tensor
    b: Tensor

    def to(self, dtype: torch.dtype) -> "Delta":
        return Delta(self.a.to(dtype), self.b.to(dtype))

    def add(self, x: Tensor, y: Tensor, places: Tensor | None) -> None:
        """Add b (a x) to y for rows `places [n]`, or all. x [T, in], y [T, out]."""
        if places is None:
            y.addmm_(x @ self.a.t(), self.b.t())
        else:
            y.index_add_(0, places, (x.index_select(0, places) @ self.a.t()) @ self.b.t())


def load_adapter(plan: AdapterPlan, spec: ModelShape, like: Tensor) -> dict[Site, Delta]:
    """Load the matrices of an adapter with the type and device of `like`. Raises ModelLoadError."""
    interleaved = spec if isinstance(spec, ModelSpec) and spec.family.names.interleaved_qkv else None
    with torch.inference_mode(), safe_open(plan.folder / TENSORS, framework="pt", device="cpu") as file:
        deltas = dict[Site, Delta]()
        for site, parts in plan.parts.items():
            a, first = [], 0
            b = torch.zeros(parts[0].slot.total, sum(part.rank for part in parts))
            for part in parts:
                stem = f"base_model.model.{part.module}.lora_"
                rows, columns = (file.get_tensor(f"{stem}{half}.weight").float() for half in "AB")
                if not (rows.isfinite().all() and columns.isfinite().all()):
                    raise ModelLoadError(f"adapter {plan.name}: {part.module} holds numbers that are not finite")
                if interleaved is not None and site.slot == "qkv":
                    columns = straighten(interleaved, columns)
                a.append(rows)
                b[part.slot.first : part.slot.first + part.slot.size, first : first + part.rank] = columns * part.scale
                first += part.rank
            deltas[site] = Delta(torch.cat(a).to(like.device, like.dtype), b.to(like.device, like.dtype))
        return deltas


Send = Callable[[IntArray, torch.device], Tensor]


def _send(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


class Adapters:
    """All loaded adapters by number."""

    def __init__(self) -> None:
        self._deltas: dict[int, Mapping[Site, Delta]] = {}

    def __len__(self) -> int:
        return len(self._deltas)

    def put(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        """Register an adapter for the rows of later steps."""
        self._deltas[number] = deltas

    def of_step(self, numbers: IntArray, device: torch.device, send: Send = _send) -> "StepAdapters | None":
        """Return the adapters of a step whose tokens [T] have these numbers; None if all are 0.

        `send` copies indices to the device.
        """
        present = np.unique(numbers)
        if not present.any():
            return None
        groups = []
        for number in present[present > 0].tolist():
            places = None if len(present) == 1 else send(np.flatnonzero(numbers == number), device)
            groups.append(AdapterRows(self._deltas[number], places))
        return StepAdapters(groups, len(numbers))


class AdapterRows(NamedTuple):
    """Rows of a step with the same adapter; `places` None: all rows."""

    deltas: Mapping[Site, Delta]
    places: Tensor | None


class StepAdapters:
    """Adapters of one step. Called with a decoder layer, it returns the adapted layer."""

    def __init__(self, groups: Sequence[AdapterRows], num_tokens: int) -> None:
        self._groups = groups
        self._num_tokens = num_tokens

    def __call__(self, index: int, layer: LayerWeights) -> LayerWeights:
        return replace(
            layer,
            qkv=self._adapted(Site(index, "qkv"), layer.qkv),
            out=self._adapted(Site(index, "out"), layer.out),
            up=self._adapted(Site(index, "up"), layer.up),
            down=self._adapted(Site(index, "down"), layer.down),
        )

    def has(self, site: Site) -> bool:
        """Return whether any adapter of the step adds to this site."""
        return any(site in group.deltas for group in self._groups)

    def add(self, site: Site, x: Tensor, y: Tensor) -> None:
        """Add the contributions of the rows' adapters for x [T, in] to y [T, out]."""
        assert len(x) >= self._num_tokens, "an adapted linear layer must see all rows of a step"
        for deltas, places in self._groups:
            if (delta := deltas.get(site)) is not None:
                delta.add(x, y, places)

    def _adapted(self, site: Site, base: Linear) -> Linear:
        return _Adapted(base, site, self) if self.has(site) else base


class _Adapted:
    """A linear layer with adapters for one step; accesses to its weight go to the base layer."""

    def __init__(self, base: Linear, site: Site, step: StepAdapters) -> None:
        self.in_features, self.out_features = base.in_features, base.out_features
        self._base, self._site, self._step = base, site, step
        self.outputs_from, self.dense_from = base.outputs_from, base.dense_from
        self.data, self.on = base.data, base.on

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        self._step.add(self._site, x, y)
        return y
