"""Weights of a few bits to what they stand for: compressed-tensors, AWQ, GPTQ (act-order too), FP8 and MXFP4.

A layer's stored tensors are its `parts`: the last word of a name, or what is appended to it, -> tensor. Results are
equal to the last bit to those of the libraries that write such checkpoints. Knows nothing of files or models.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.models.packing import AWQ, EXPERTS, GPTQ, MX_GROUP, SCALED, WORDS, Packing

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
"""Of a cache in fewer bits, which ours is not: left aside."""
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word has the values of eight outputs
_BYTES = (torch.int8, torch.float8_e4m3fn)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the first eight of four bits' values; the others are their negatives
_NO_SCALE = 255  # not a number


def weight_of(packing: Packing, name: str) -> str | None:
    """The name of the weight whose values a tensor of this name may hold; None for other tensors."""
    if packing.layout == EXPERTS:
        return name.removesuffix(f"_{_BODY[EXPERTS]}") if name.endswith(f"_{_BODY[EXPERTS]}") else None
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last == _BODY[packing.layout] else None


def names_of(packing: Packing, weight: str) -> dict[str, str]:
    """The names of all that may be stored of a weight, by its parts; empty where no weight of this name can be."""
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
    """Whether parts of these names are a layer in fewer bits: one kept as it was may lie beside them."""
    return _BODY[packing.layout] in names and any(name in names for name in _SCALES[packing.layout])


def shape_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[int, int]:
    """Outputs and inputs of a stored layer."""
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
    """The weight [out, in], of its scales' type, or [experts, in, out] bfloat16. Errors: ModelLoadError if the parts do
    not fit each other."""
    if packing.layout == EXPERTS:
        return _experts(_part(parts, _BODY[EXPERTS]), _part(parts, _SCALES[EXPERTS][0]))
    shape = shape_of(packing, parts)
    scales = _scales(packing, parts, shape)
    values, order = _values(packing, parts, shape), _order(packing, parts, shape)
    zeros = _zeros(packing, parts, shape)
    if zeros is not None:  # differences of bytes: exact in every type
        values = values.to(torch.int16) - _spread(zeros, packing, shape, order)
    return values.to(scales.dtype) * _spread(scales, packing, shape, order)


def bytes_of(packing: Packing, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values [out, in] int8 or e4m3, scales [out] float32, and the stored scale [1] float32 of what the layer takes,
    None where tokens have their own; only where `packing.integers` or `packing.floats`. Errors: as `dense`."""
    shape = shape_of(packing, parts)
    scales = _scales(packing, parts, shape).float().reshape(-1).expand(shape[0]).contiguous()
    if not bool(scales.isfinite().all()):
        raise ModelLoadError("scales that are not finite")
    values = _typed(parts[_BODY[SCALED]], torch.float8_e4m3fn if packing.floats else torch.int8, "values")
    given = next((parts[name] for name in _INPUTS if name in parts), None) if packing.static else None
    if given is None:  # without one, a scale for each token is the more precise
        return values, scales, None
    inputs = given.float().reshape(-1)
    if inputs.numel() != 1 or not bool(inputs.isfinite() & (inputs > 0)):
        raise ModelLoadError(f"a scale of inputs {inputs.tolist()[:4]} (read: one that is finite and positive)")
    return values, scales, inputs


def _experts(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [experts, out, groups, bytes] uint8, the lower four bits first, scales [experts, out, groups] uint8, a
    power of two each -> [experts, in, out]. Expert by expert: what is in between takes many times a weight's bytes."""
    blocks, scales = _typed(blocks, torch.uint8, "values"), _typed(scales, torch.uint8, "scales")
    if blocks.dim() != 4 or blocks.shape[-1] != MX_GROUP // 2 or scales.shape != blocks.shape[:-1]:
        raise ModelLoadError(f"scales {list(scales.shape)} for blocks {list(blocks.shape)}")
    if bool((scales == _NO_SCALE).any()):
        raise ModelLoadError("scales that are not finite")
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
    """[out, in]: signed where there are no zero points, else as the zero points are."""
    body = parts[_BODY[packing.layout]]
    if packing.layout == SCALED:
        if body.dtype not in _BYTES:
            raise ModelLoadError(f"values of type {_name(body)} are not read (read: int8, float8_e4m3fn)")
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
        raise ModelLoadError(f"scales of type {_name(scales)} are not read")
    if packing.in_float or scales.dtype.itemsize == 1:
        scales = scales.float()
    return _grid(scales.t() if packing.layout in (AWQ, GPTQ) else scales, packing, shape, "scales")


def _order(packing: Packing, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
    """Of each input, its group [in]; None where they follow each other."""
    found = parts.get(_ORDERS.get(packing.layout, ""))
    if found is None:
        return None
    groups = -(-shape[1] // packing.block[1]) if packing.block[1] else 1
    if found.shape != (shape[1],) or not bool(((found >= 0) & (found < groups)).all()):
        raise ModelLoadError(f"an order of groups {list(found.shape)} for {shape[1]} inputs in {groups} groups")
    return found.long()


def _grid(found: Tensor, packing: Packing, shape: tuple[int, int], what: str) -> Tensor:
    """`found` as [rows, columns] of blocks."""
    rows, columns = (1 if not step else -(-size // step) for step, size in zip(packing.block, shape, strict=True))
    if found.numel() != rows * columns or (found.dim() == 2 and rows > 1 and found.shape[0] != rows):
        raise ModelLoadError(f"{what} {list(found.shape)} for a weight {list(shape)} in {rows} x {columns} blocks")
    return found.reshape(rows, columns)


def _spread(grid: Tensor, packing: Packing, shape: tuple[int, int], order: Tensor | None) -> Tensor:
    """One for each value, or for each output where a row has one."""
    for dim, step in enumerate(packing.block):
        if dim == 1 and order is not None:
            grid = grid.index_select(1, order)
        elif step > 1:
            grid = grid.repeat_interleave(step, dim).narrow(dim, 0, shape[dim])
    return grid


def _fields(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """words [.., w] int32 -> the values in them [.., w · 32 / bits] uint8, the lowest bits first."""
    words = _typed(words, torch.int32, "words")
    places = range(32 // bits) if order is None else order
    return torch.stack([(words >> place * bits & (1 << bits) - 1).to(torch.uint8) for place in places], -1).flatten(-2)


def _part(parts: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in parts:
        raise ModelLoadError(f"there is no {name} beside it")
    return parts[name]


def _typed(found: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    if found.dtype != dtype:
        raise ModelLoadError(f"{what} of type {_name(found)} are not read")
    return found


def _name(found: Tensor) -> str:
    return str(found.dtype).removeprefix("torch.")
