"""A folder of safetensors as a tensor source: one tensor in memory at a time, with a check that all tensors are used.
Quantized weights are unpacked while they are read, on the device.

Unpack quantized weights: compressed-tensors, AWQ, GPTQ (also act-order), FP8, MXFP4 and NVFP4.

The stored tensors of a layer are its `parts`: the last component of a name, or its suffix, mapped to the tensor.
Results are bit-identical to those of the libraries that write such checkpoints.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.linear import MakeLinear, make_linear
from engine.models.packing import AWQ, EXPERTS, GPTQ, MX_GROUP, NVFP4, NVFP4_WORDS, SCALED, WORDS, Packing
from engine.models.quantized import (
    BlockWeight,
    FloatWeight,
    PackedWeight,
    RoundedWeight,
    StoredWeight,
    floats_of,
    group_of,
    pack_values,
)
from engine.models.spec import ModelSpec
from engine.models.stored_tensors import damage_of, text_names, weight_files
from engine.models.weights import (
    DummyTensors,
    Gather,
    LayerWeights,
    MakeExperts,
    ModelWeights,
    ResidentLayers,
    build_layers,
    build_weights,
    torch_dtype,
)
from engine.panics import LibraryPanicError, as_error

_BODY = {
    WORDS: "weight_packed", AWQ: "qweight", GPTQ: "qweight", SCALED: "weight", EXPERTS: "blocks", NVFP4: "weight",
    NVFP4_WORDS: "weight_packed",
}  # fmt: skip
_SCALES = {
    WORDS: ("weight_scale",),
    AWQ: ("scales",),
    GPTQ: ("scales",),
    SCALED: ("weight_scale", "weight_scale_inv"),
    EXPERTS: ("scales",),
    NVFP4: ("weight_scale",),
    NVFP4_WORDS: ("weight_scale",),
}
_ZEROS = {WORDS: "weight_zero_point", AWQ: "qzeros", GPTQ: "qzeros", SCALED: "weight_zero_point"}
_FACTORS = {NVFP4: "weight_scale_2", NVFP4_WORDS: "weight_global_scale"}
"""Of all scales: a factor, or a divisor."""
_ORDERS = {WORDS: "weight_g_idx", GPTQ: "g_idx"}
_INPUTS = ("input_scale", "activation_scale")
_ASIDE = ("weight_shape", "input_zero_point", "input_global_scale", *_INPUTS)
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "output_scale", "prob_output_scale")
"""Scales of a quantized cache, which are ignored."""
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # positions in a word of the values of eight outputs
_FLOAT8 = torch.float8_e4m3fn
_BYTES = (torch.int8, _FLOAT8)
_NO_SCALE = 255  # NaN


def weight_of(packing: Packing, name: str) -> str | None:
    """Return the name of the weight whose values a tensor of this name may hold; None for other tensors."""
    if packing.layout == EXPERTS:
        return name.removesuffix(f"_{_BODY[EXPERTS]}") if name.endswith(f"_{_BODY[EXPERTS]}") else None
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last == _BODY[packing.layout] else None


def names_of(packing: Packing, weight: str) -> dict[str, str]:
    """Return the names under which parts of a weight may be stored, by part; empty if it cannot be quantized."""
    if packing.layout == EXPERTS:
        return {part: f"{weight}_{part}" for part in _parts(packing)}
    module, _, last = weight.rpartition(".")
    return {part: f"{module}.{part}" for part in _parts(packing)} if last == "weight" else {}


def _parts(packing: Packing) -> tuple[str, ...]:
    layout = packing.layout
    if layout == EXPERTS:
        return _BODY[layout], *_SCALES[layout]
    order = (_ORDERS[layout],) if layout in _ORDERS else ()
    return (_BODY[layout], *_SCALES[layout], (_ZEROS | _FACTORS)[layout], *order, *_ASIDE)


def is_packed(packing: Packing, names: Sequence[str]) -> bool:
    """Return whether these parts form a quantized layer; unquantized layers may have some of the same names."""
    return _BODY[packing.layout] in names and any(name in names for name in _SCALES[packing.layout])


def shape_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return outputs and inputs of a stored layer."""
    body, per_word = parts[_BODY[packing.layout]], 32 // packing.bits
    rows, columns = body.shape
    if packing.small_floats:
        return rows, 2 * columns
    if packing.layout == AWQ:
        return columns * per_word, rows
    if packing.layout == GPTQ:
        return columns, rows * per_word
    if packing.layout == WORDS and "weight_shape" in parts:
        stored = parts["weight_shape"].tolist()
        if len(stored) != 2 or stored[0] != rows or not 0 <= columns * per_word - stored[1] < per_word:
            raise ModelLoadError(f"words {list(body.shape)} do not hold a weight of {stored}")
        return int(stored[0]), int(stored[1])
    return rows, columns * (per_word if packing.layout == WORDS else 1)


def dense(packing: Packing, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the weight [out, in] of the type of its scales, or [experts, in, out] bfloat16.

    Raises ModelLoadError for inconsistent parts.
    """
    if packing.layout == EXPERTS:
        return _experts(*small_floats_of(packing, parts))
    if packing.small_floats:
        return floats_of(*small_floats_of(packing, parts))
    shape = shape_of(packing, parts)
    scales = _scales(packing, parts, shape)
    values, order = _values(packing, parts, shape), _order(packing, parts, shape)
    zeros = _zeros(packing, parts, shape)
    if zeros is not None:  # differences of bytes are exact in every type
        values = values.to(torch.int16) - _spread(zeros, packing, shape, order)
    return values.to(scales.dtype) * _spread(scales, packing, shape, order)


def bytes_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values [out, in] int8 or e4m3, scales [out] float32, and the stored scale of inputs [1] float32, or None.

    Only for `packing.integers` or `packing.floats`. Raises ModelLoadError like `dense`.
    """
    shape = shape_of(packing, parts)
    scales = _scales(packing, parts, shape).float().reshape(-1).expand(shape[0]).contiguous()
    if not bool(scales.isfinite().all()):
        raise ModelLoadError("some scales are not finite")
    values = _typed(parts[_BODY[SCALED]], _FLOAT8 if packing.floats else torch.int8, "values")
    given = next((parts[name] for name in _INPUTS if name in parts), None) if packing.static else None
    if given is None:  # a scale per token is then more precise
        return values, scales, None
    inputs = given.float().reshape(-1)
    if inputs.numel() != 1 or not bool(inputs.isfinite() & (inputs > 0)):
        raise ModelLoadError(f"the scale of inputs {inputs.tolist()[:4]} is not a finite positive number")
    return values, scales, inputs


def nibbles_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the values, scales and zero points of a `PackedWeight`; None if its groups cannot be kept.

    Only for `packing.nibbles`. Raises ModelLoadError like `dense`.
    """
    shape = shape_of(packing, parts)
    stored = packing.block[1] or shape[1]
    group, order = group_of(shape[1], stored), _order(packing, parts, shape)
    if group is None or (
        order is not None and not torch.equal(order, torch.arange(shape[1], device=order.device) // stored)
    ):
        return None
    scales, zeros = _scales(packing, parts, shape), _zeros(packing, parts, shape)
    if not bool(scales.isfinite().all()):
        raise ModelLoadError("some scales are not finite")
    values = _values(packing, parts, shape)
    if zeros is None:
        half = 1 << packing.bits - 1
        values, zeros = values + half, torch.full(scales.shape, half, device=scales.device)
    repeats = shape[1] // group // scales.shape[1]
    each, points = (part.repeat_interleave(repeats, 1).contiguous() for part in (scales, zeros.to(torch.uint8)))
    return pack_values(values), each, points


def blocks_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the values [out, in] e4m3 and scales float32 of a `BlockWeight`; None if blocks do not divide it.

    Only for `packing.blocks`. Raises ModelLoadError like `dense`.
    """
    shape = shape_of(packing, parts)
    scales, values = _scales(packing, parts, shape).float(), _typed(parts[_BODY[SCALED]], _FLOAT8, "values")
    if not bool(scales.isfinite().all()):
        raise ModelLoadError("some scales are not finite")
    return None if any(size % step for size, step in zip(shape, packing.block, strict=True)) else (values, scales)


def small_floats_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return values [out, in / 2] uint8 and scales [out, groups] float32 of a `FloatWeight`; of EXPERTS
    [experts, out, ...], the scales e8m0.

    Only for `packing.small_floats`. Raises ModelLoadError like `dense`.
    """
    if packing.layout == EXPERTS:
        return _small_floats_of_experts(parts)
    values, factor = _typed(parts[_BODY[packing.layout]], torch.uint8, "values"), _part(parts, _FACTORS[packing.layout])
    if factor.numel() != 1:
        raise ModelLoadError(f"the scale of all values {list(factor.shape)} is not one number")
    scales, whole = _scales(packing, parts, shape_of(packing, parts)), factor.float().reshape(())
    scales = scales * whole if packing.layout == NVFP4 else scales / whole
    if not bool(scales.isfinite().all()):
        raise ModelLoadError("some scales are not finite")
    return values, scales


def _small_floats_of_experts(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    blocks = _typed(_part(parts, _BODY[EXPERTS]), torch.uint8, "values")
    scales = _typed(_part(parts, _SCALES[EXPERTS][0]), torch.uint8, "scales")
    if blocks.dim() != 4 or blocks.shape[-1] != MX_GROUP // 2 or scales.shape != blocks.shape[:-1]:
        raise ModelLoadError(f"scales {list(scales.shape)} for blocks {list(blocks.shape)}")
    if bool((scales == _NO_SCALE).any()):
        raise ModelLoadError("some scales are not finite")
    return blocks.flatten(2), scales.view(torch.float8_e8m0fnu)


def _experts(values: Tensor, scales: Tensor) -> Tensor:
    """Unpack experts to [experts, in, out], one expert at a time because intermediates are many times as large."""
    count, outputs, groups = scales.shape
    weight = torch.empty(count, groups * MX_GROUP, outputs, dtype=torch.bfloat16, device=values.device)
    for expert, bits, scale in zip(weight, values, scales, strict=True):
        expert.copy_(floats_of(bits, scale.float()).t())  # exact in float32, and in bfloat16
    return weight


def _values(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """Return values [out, in]: signed without zero points, else in the range of the zero points."""
    body = parts[_BODY[packing.layout]]
    if packing.layout == SCALED:
        if body.dtype not in _BYTES:
            raise ModelLoadError(f"values of type {_name(body)} are not supported (supported: int8, float8_e4m3fn)")
        return body
    if packing.layout == AWQ:
        return _fields(body, packing.bits, _AWQ_FIELDS).t()
    if packing.layout == GPTQ:
        return _fields(body.t(), packing.bits)
    values = _fields(body, packing.bits)[:, : shape[1]]
    return values if packing.zero_points else (values.to(torch.int16) - (1 << packing.bits - 1)).to(torch.int8)


def _zeros(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
    if not packing.zero_points:
        return None
    stored = _part(parts, _ZEROS[packing.layout])
    if packing.layout == SCALED:
        zeros = _typed(stored, torch.int8, "zero points")
    elif packing.layout == WORDS:  # words along the outputs
        zeros = _fields(stored.t(), packing.bits).t()[: shape[0]]
    else:
        fields = _fields(stored, packing.bits, _AWQ_FIELDS if packing.layout == AWQ else None)
        zeros = ((fields + packing.shift) & (1 << packing.bits) - 1).t()
    return _grid(zeros.to(torch.int16), packing, shape, "zero points")


def _scales(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    name = next((name for name in _SCALES[packing.layout] if name in parts), _SCALES[packing.layout][0])
    scales = _part(parts, name)
    if not scales.dtype.is_floating_point:
        raise ModelLoadError(f"scales of type {_name(scales)} are not supported")
    if packing.in_float or scales.dtype.itemsize == 1:
        scales = scales.float()
    return _grid(scales.t() if packing.layout in (AWQ, GPTQ) else scales, packing, shape, "scales")


def _order(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
    """Return the group of each input [in]; None if groups are consecutive."""
    found = parts.get(_ORDERS.get(packing.layout, ""))
    if found is None:
        return None
    groups = -(-shape[1] // packing.block[1]) if packing.block[1] else 1
    if found.shape != (shape[1],) or not bool(((found >= 0) & (found < groups)).all()):
        raise ModelLoadError(f"the group order {list(found.shape)} does not match {shape[1]} inputs in {groups} groups")
    return found.long()


def _grid(found: Tensor, packing: Packing, shape: tuple[int, int], what: str) -> Tensor:
    """Return `found` as [rows, columns] of blocks."""
    rows, columns = (1 if not step else -(-size // step) for step, size in zip(packing.block, shape, strict=True))
    if found.numel() != rows * columns or (found.dim() == 2 and rows > 1 and found.shape[0] != rows):
        raise ModelLoadError(f"{what} {list(found.shape)} for a weight {list(shape)} in {rows} x {columns} blocks")
    return found.reshape(rows, columns)


def _spread(grid: Tensor, packing: Packing, shape: tuple[int, int], order: Tensor | None) -> Tensor:
    """Expand a grid of blocks to one entry per value, or per output if a row has a single block."""
    for dim, step in enumerate(packing.block):
        if dim == 1 and order is not None:
            grid = grid.index_select(1, order)
        elif step > 1:
            grid = grid.repeat_interleave(step, dim).narrow(dim, 0, shape[dim])
    return grid


def _fields(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack words [.., w] int32 to values [.., w · 32 / bits] uint8, the lowest bits first."""
    words = _typed(words, torch.int32, "words")
    places = range(32 // bits) if order is None else order
    return torch.stack([(words >> place * bits & (1 << bits) - 1).to(torch.uint8) for place in places], -1).flatten(-2)


def _part(parts: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parts:
        raise ModelLoadError(f"the tensor {name} is missing")
    return parts[name]


def _typed(found: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    if found.dtype != dtype:
        raise ModelLoadError(f"{what} of type {_name(found)} are not supported")
    return found


def _name(found: Tensor) -> str:
    return str(found.dtype).removeprefix("torch.")


_INERT = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.bias|attention\.masked_bias)$")
_BY_TOKEN = re.compile(r"(embed_tokens|embed_in|embed_out|lm_head)\.weight$")  # one row for each token
PROGRESS_SECONDS = 5.0
_NAMED = 3  # tensors that a message names
_T = TypeVar("_T")
log = logging.getLogger("tidemill.engine")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_weights(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    make: MakeLinear = make_linear,
    gather: Gather = ResidentLayers,
    stored: bool = False,
    experts: MakeExperts | None = None,
) -> ModelWeights:
    """Load the checkpoint in `folder`, or create random weights of its shape with `load_format` "dummy".

    Args:
        dtype: Type of the weights; "auto": the type of the checkpoint.
        load_format: "auto" or "dummy".
        stored: Whether layers stored in 8 or 4 bits compute with these bits.
        experts: Makes the layers of experts from these bits; None: they are unpacked.

    Raises:
        ModelLoadError: One line that names the missing or wrong tensor or file.
    """
    kind = torch_dtype(spec.dtype if dtype == "auto" else dtype)
    target = torch.device(device)
    with torch.inference_mode():
        if load_format == "dummy":
            return build_weights(spec, DummyTensors(0, kind, target), make, gather)
        with Checkpoint(folder, kind, target, spec.packing, stored=stored) as checkpoint:
            weights = build_weights(spec, checkpoint, make, gather, experts)
            copies = tuple(f"{name}.weight" for name in spec.family.names.head)
            checkpoint.check_all_used(tied_copies=copies if spec.tie_word_embeddings else ())
        if weights.layers.streamed:
            checkpoint.forget()  # page cache of the files must not add to a stated memory budget
        return weights


def load_layers(
    spec: ModelSpec,
    folder: Path,
    wanted: Sequence[int],
    *,
    dtype: str,
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    make: MakeLinear = make_linear,
    stored: bool = False,
    keep: Callable[[int, LayerWeights], LayerWeights] = lambda _index, layer: layer,
) -> list[LayerWeights]:
    """Load some layers again, by ascending index, with the same result as `load_weights`.

    `keep` is applied to each layer before the next one is loaded. Raises ModelLoadError.
    """
    kind, target = torch_dtype(dtype), torch.device(device)
    with torch.inference_mode():
        if load_format != "dummy":
            with Checkpoint(folder, kind, target, spec.packing, stored=stored) as checkpoint:
                return list(map(keep, wanted, build_layers(spec, checkpoint, wanted, make)))
        kept: list[LayerWeights] = []

        def gather(layers: Iterator[LayerWeights]) -> ResidentLayers:
            kept.extend(keep(index, layer) for index, layer in enumerate(layers) if index in wanted)
            return ResidentLayers()

        # Random weights depend on all numbers drawn before them.
        build_weights(spec, DummyTensors(0, kind, target), make, gather)
        return kept


class Checkpoint:
    """Tensors of a checkpoint folder; a context manager that maps the files while it is open.

    Raises ModelLoadError if the folder has no safetensors, or a file is missing, damaged or inconsistent.

    Args:
        packing: Storage format of quantized linear layers; None: none are quantized.
        vocabulary: Number of tokens of the model. Of tensors with one row per token, callers may then fetch fewer
            rows, which are taken from the middle.
        stored: Whether `fetch_bytes` returns weights stored in 8 or 4 bits.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        packing: Packing | None = None,
        *,
        vocabulary: int | None = None,
        stored: bool = False,
    ) -> None:
        self._packing = packing
        self._bytes = stored and packing is not None and packing.computes
        self._vocabulary = vocabulary
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self._stored_as: dict[str, str] = {}
        self._unused: set[str] = set()
        self._next_report = 0.0

    def __enter__(self) -> Self:
        for name in weight_files(self._folder):
            for tensor in self._open(name).keys():  # noqa: SIM118 - a safetensors handle is not a mapping
                if tensor in self._where:
                    raise ModelLoadError(f"{self._folder}: tensor {tensor} is in {self._where[tensor]} and in {name}")
                self._where[tensor] = name
        self._stored_as = text_names(self._where)
        self._where = {name: self._where[outer] for name, outer in self._stored_as.items()}
        self._unused = set(self._where)
        self._next_report = time.monotonic() + PROGRESS_SECONDS
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._files.clear()

    @property
    def is_part(self) -> bool:
        """Whether the tensors are the text part of a multimodal wrapper."""
        return any(name != outer for name, outer in self._stored_as.items())

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name, or a quantized weight."""
        return name in self._where or bool(self._stored(name))

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return one tensor, converted. Raises ModelLoadError if it is missing, not floating or of another shape."""
        if self._stored(name):
            weight = self._unpack(name, dense)
            return self._converted(name, weight[self._rows(name, tuple(weight.shape), shape)])
        if name not in self._where:
            files = ", ".join(sorted(self._files)[:_NAMED]) + (", ..." if len(self._files) > _NAMED else "")
            raise ModelLoadError(f"{self._folder} lacks tensor {name} (files: {files})")
        file, stored = self._files[self._where[name]], self._stored_as[name]
        rows = self._rows(name, tuple(file.get_slice(stored).get_shape()), shape)
        return self._converted(name, self._floats(name, rows))

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> StoredWeight | None:
        """See TensorSource."""
        packing = self._packing
        found: StoredWeight | None = None
        if packing is None or not self._bytes or not self._stored(name):
            return None
        if packing.small_floats:
            values, scales = (each.flatten(0, -2) for each in self._unpack(name, small_floats_of))
            scales = scales if scales.dtype.itemsize == 1 else scales.to(self._dtype)
            found = FloatWeight(values, scales, self._dtype)
        elif packing.nibbles:
            if (nibbles := self._unpack(name, nibbles_of)) is not None:
                found = PackedWeight(*nibbles[:2], self._dtype, nibbles[2])
        elif packing.blocks:
            if (blocks := self._unpack(name, blocks_of)) is not None:
                found = BlockWeight.of(*blocks, packing.block, self._dtype)
        else:
            values, scales, inputs = self._unpack(name, bytes_of)
            found = RoundedWeight(values, scales, self._dtype, inputs)
        if found is not None:
            self._rows(name, found.shape, shape)
        return found

    def dense_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: quantized layers unpacked to the requested type, others unchanged."""
        found = dict[str, Tensor]()
        bodies = () if self._packing is None else [weight_of(self._packing, name) for name in self._where]
        for weight in sorted(filter(None, bodies)):
            if self._stored(weight):
                found[weight] = self._unpack(weight, dense).to(self._dtype)
        for name in sorted(self._unused):
            if not _INERT.search(name) and name.rpartition(".")[2] not in CACHE_SCALES:
                found[name] = self._floats(name).to(self._device)
        return found

    def check_all_used(self, *, tied_copies: tuple[str, ...] = ()) -> None:
        """Raise ModelLoadError if a tensor was never fetched, because the model would differ from the trained one.

        Rotary and mask buffers, scales of a quantized cache, and zero biases of quantized layers are named in one
        warning instead. `tied_copies` are copies of a tied head.
        """
        unused = sorted(self._unused.difference(tied_copies))
        inert = [name for name in unused if self._is_inert(name)]
        if left := [name for name in unused if name not in inert]:
            shown = self._shown(left)
            raise ModelLoadError(f"{self._folder} has tensors this model does not use: {shown}")
        if inert:
            log.warning("%s: tensors without effect are not used: %s", self._folder, self._shown(inert))

    def _shown(self, names: Sequence[str]) -> str:
        """Return the first of some stored tensors with their files, and the number of the others."""
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(f"{name} ({self._where[name]})" for name in names[:_NAMED]) + more

    def _is_inert(self, name: str) -> bool:
        module, _, last = name.rpartition(".")
        if _INERT.search(name) or (self._packing is not None and last in CACHE_SCALES):
            return True
        return last == "bias" and bool(self._stored(f"{module}.weight")) and not bool(self._floats(name).any())

    def _stored(self, name: str) -> dict[str, str]:
        """Return the stored tensor names of a quantized weight, by part; empty for any other weight."""
        if self._packing is None:
            return {}
        named = names_of(self._packing, name)
        found = {part: stored for part, stored in named.items() if stored in self._where}
        return found if is_packed(self._packing, tuple(found)) else {}

    def _unpack(self, name: str, how: Callable[[Packing, dict[str, Tensor]], _T]) -> _T:
        assert self._packing is not None
        stored = self._stored(name)
        try:
            parts = {
                part: self._files[self._where[each]].get_tensor(self._stored_as[each]).to(self._device)
                for part, each in stored.items()
            }
            found = how(self._packing, parts)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._folder}: weight {name} by {self._packing.name}: {error.message}") from None
        self._mark_used(stored.values())
        return found

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor on the device in the requested type. Raises ModelLoadError if a value is not finite."""
        converted = tensor.to(self._device, self._dtype)
        if not is_finite(converted):
            where = self._file_of(name)
            kind = str(self._dtype).removeprefix("torch.")
            cause = f"does not fit into {kind}; set --dtype" if is_finite(tensor) else "is damaged; download it again"
            raise ModelLoadError(f"{self._folder}: tensor {name} ({where}) has NaN or infinity: it {cause}")
        return converted

    def _floats(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return a tensor, or some of its rows, unconverted."""
        file, stored = self._files[self._where[name]], self._stored_as[name]
        tensor: Tensor = file.get_tensor(stored) if rows == slice(None) else file.get_slice(stored)[rows]
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError(f"{self._folder}: tensor {name} is of type {kind}, and config.json does not say how")
        self._mark_used((name,))
        return tensor

    def _mark_used(self, names: Iterable[str]) -> None:
        """Mark tensors as loaded; log the progress every PROGRESS_SECONDS."""
        self._unused.difference_update(names)
        if (now := time.monotonic()) >= self._next_report:
            self._next_report = now + PROGRESS_SECONDS
            total = len(self._where)
            log.info("%d of %d tensors of the weights are loaded", total - len(self._unused), total)

    def _rows(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> slice:
        """Return the rows of a tensor that make one of this shape."""
        if found == shape:
            return slice(None)
        if found[0] == self._vocabulary and found[1:] == shape[1:]:
            return slice((found[0] - shape[0]) // 2, (found[0] + shape[0]) // 2)
        stored = f"tensor {name} ({self._file_of(name)}) is {list(found)}"
        whole = [self._vocabulary or shape[0], *shape[1:]] if _BY_TOKEN.search(name) else list(shape)
        raise ModelLoadError(f"{self._folder}: {stored}, config.json implies {whole}")

    def _file_of(self, name: str) -> str:
        return self._where.get(name) or self._where[next(iter(self._stored(name).values()))]

    def forget(self) -> None:
        """Drop the unmapped pages of the files from the page cache; call it after the context has ended."""
        for name in sorted(set(self._where.values())):
            with (self._folder / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _open(self, name: str) -> Any:
        path = self._folder / name
        try:
            self._files[name] = safe_open(path, framework="pt", device="cpu")
        except BaseException as raised:
            error = as_error(raised)
            if not isinstance(error, SafetensorError | OSError | LibraryPanicError):
                raise
            raise ModelLoadError(f"{path} {damage_of(path)} ({error}); download it again") from None
        return self._files[name]


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. A sum is fast, but may overflow; then the values decide."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
