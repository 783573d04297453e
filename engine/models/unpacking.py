"""Unpack quantized weights: compressed-tensors, AWQ, GPTQ (also act-order), FP8 and MXFP4.

The stored tensors of a layer are its `parts`: the last component of a name, or its suffix, mapped to the tensor.
Results are bit-identical to those of the libraries that write such checkpoints.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.packing import AWQ, EXPERTS, GPTQ, MX_GROUP, SCALED, WORDS, Packing
from engine.models.quantized import group_of, pack_values

_BODY = {WORDS: "weight_packed", AWQ: "qweight", GPTQ: "qweight", SCALED: "weight", EXPERTS: "blocks"}
_SCALES = {
    WORDS: ("weight_scale",),
    AWQ: ("scales",),
    GPTQ: ("scales",),
    SCALED: ("weight_scale", "weight_scale_inv"),
    EXPERTS: ("scales",),
}
_ZEROS = {WORDS: "weight_zero_point", AWQ: "qzeros", GPTQ: "qzeros", SCALED: "weight_zero_point"}
_ORDERS = {WORDS: "weight_g_idx", GPTQ: "g_idx"}
_INPUTS = ("input_scale", "activation_scale")
_ASIDE = ("weight_shape", "input_zero_point", *_INPUTS)
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "output_scale", "prob_output_scale")
"""Scales of a quantized cache, which are ignored."""
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # positions in a word of the values of eight outputs
_FLOAT8 = torch.float8_e4m3fn
_BYTES = (torch.int8, _FLOAT8)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the first eight of the 4-bit values; the others are their negatives
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
    return (_BODY[layout], *_SCALES[layout], _ZEROS[layout], *order, *_ASIDE)


def is_packed(packing: Packing, names: Sequence[str]) -> bool:
    """Return whether these parts form a quantized layer; unquantized layers may have some of the same names."""
    return _BODY[packing.layout] in names and any(name in names for name in _SCALES[packing.layout])


def shape_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return outputs and inputs of a stored layer."""
    body, per_word = parts[_BODY[packing.layout]], 32 // packing.bits
    rows, columns = body.shape
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
        return _experts(_part(parts, _BODY[EXPERTS]), _part(parts, _SCALES[EXPERTS][0]))
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
    if group is None or (order is not None and not torch.equal(order, torch.arange(shape[1]) // stored)):
        return None
    scales, zeros = _scales(packing, parts, shape), _zeros(packing, parts, shape)
    if not bool(scales.isfinite().all()):
        raise ModelLoadError("some scales are not finite")
    values = _values(packing, parts, shape)
    if zeros is None:
        half = 1 << packing.bits - 1
        values, zeros = values + half, torch.full(scales.shape, half)
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


def _experts(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack experts to [experts, in, out], one expert at a time because intermediates are many times as large.

    blocks [experts, out, groups, bytes] uint8, the lower four bits first; scales [experts, out, groups] uint8, each a
    power of two.
    """
    blocks, scales = _typed(blocks, torch.uint8, "values"), _typed(scales, torch.uint8, "scales")
    if blocks.dim() != 4 or blocks.shape[-1] != MX_GROUP // 2 or scales.shape != blocks.shape[:-1]:
        raise ModelLoadError(f"scales {list(scales.shape)} for blocks {list(blocks.shape)}")
    if bool((scales == _NO_SCALE).any()):
        raise ModelLoadError("some scales are not finite")
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    powers = torch.tensor([2.0 ** (exponent - 127) for exponent in range(_NO_SCALE)])
    count, outputs, groups, _ = blocks.shape
    weight = torch.empty(count, groups * MX_GROUP, outputs, dtype=torch.bfloat16)
    for expert, bits, scale in zip(weight, blocks, scales, strict=True):
        pairs = torch.stack((bits & 15, bits >> 4), -1).flatten(-2)
        products = values[pairs.int()] * powers[scale.int()].unsqueeze(-1)  # exact in float32, and in bfloat16
        expert.copy_(products.flatten(1).t())
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
