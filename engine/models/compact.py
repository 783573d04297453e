"""Linear layers on 8-bit floats, and linear layers of a GPU on the 4 or 8 bits of a checkpoint.

Operators of torch multiply them as they are stored: tiles of 4 bits for few rows, blocks of 8-bit floats if the card
can. Other calls unpack the weight, which costs memory traffic but no memory for a second copy. `check` compares the
operators with unpacked weights on the device that will serve; layers of an operator that fails unpack in every call.

Linear layers on 8-bit floats (e4m3).

Weights are rounded once, at load or by the author of the checkpoint, with a scale per output. Inputs are rounded in
every call, with a scale per token or the checkpoint's scale for all tokens.

On a CUDA device `torch._scaled_mm` multiplies the bytes, with the scales of rows and columns inside. Its results are
bfloat16, and both sides of a weight must be multiples of 16. On other devices the same rounded numbers are multiplied
as float32: a twin for tests and for measuring the loss of quality, not for speed. Nothing synchronises with the device.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.linear import AnyWeight, Linear, PlainLinear, make_linear
from engine.models.quantized import (
    BlockWeight,
    PackedWeight,
    RoundedWeight,
    StoredLinear,
    as_bytes,
    group_of,
    pack_values,
    pack_weight,
    scaled,
)

FLOAT8 = torch.float8_e4m3fn
OLDEST_ARCH = (8, 9)
"""Oldest compute capability whose tensor cores multiply 8-bit floats."""

_HIGHEST = torch.finfo(FLOAT8).max
_SMALLEST = 1e-12  # lower bound of the maximum of a row, to avoid division by zero
_MULTIPLE = 16


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] to values [T, k] e4m3 and scales [T, 1] float32; rows that are not finite become NaN."""
    top = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
    scales = top.clamp_min(_SMALLEST) * (1 / _HIGHEST)
    return (x / scales).to(FLOAT8), scales


def scale_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Like `round_rows`, with one scale [1] float32 for all finite rows; values are clipped to the largest float."""
    values = (x.float() / scale).clamp(-_HIGHEST, _HIGHEST).to(FLOAT8)
    return values, torch.where(x.isfinite().all(-1, keepdim=True), scale, torch.nan)


class RoundedRows(NamedTuple):
    """Rounded inputs of a layer: values [T, k] e4m3, scales [T, 1] float32."""

    values: Tensor
    scales: Tensor


class Rounding(NamedTuple):
    """Functions that round layer inputs to 8-bit floats: torch operators, or kernels."""

    by_row: Callable[[Tensor], tuple[Tensor, Tensor]] = round_rows
    by_scale: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = scale_rows


BY_TORCH = Rounding()


RowProduct = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(rows [T, k], scales [T, 1], values [n, k], by_output [n, 1]) -> [T, n] bfloat16."""


class Float8Linear(StoredLinear):
    """A `Linear` on a weight with values e4m3 and scales [n, 1]; input and output are bfloat16.

    `inputs`: as of the weight. `product`: None: that of the device.
    """

    def __init__(
        self,
        weight: RoundedWeight,
        bias: Tensor | None,
        rounding: Rounding = BY_TORCH,
        product: RowProduct | None = None,
    ) -> None:
        super().__init__(weight, bias)
        self._rounding, self.inputs, self._product = rounding, weight.inputs, product

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None, rounding: Rounding = BY_TORCH, product: RowProduct | None = None
    ) -> "Float8Linear":
        """Round a weight [n, k], which is not kept. Raises ValueError if it is not finite."""
        values, scales = round_rows(weight)
        if not bool(scales.isfinite().all()):
            raise ValueError("the weight has values that are not finite")
        return cls(RoundedWeight(values, scales, torch.bfloat16), bias, rounding, product)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        by_row, by_scale = self._rounding
        result = self.product(RoundedRows(*(by_row(rows) if self.inputs is None else by_scale(rows, self.inputs))))
        return result.view(*x.shape[:-1], self.out_features)

    def product(self, rows: RoundedRows) -> Tensor:  # type: ignore[override]
        """Return the product [T, n] for inputs rounded for this layer."""
        product = self._product or (_on_device if rows.values.device.type in ("cuda", "meta") else _as_floats)
        result = product(*rows, self._weight.values, self._weight.scales)
        return result if self._bias is None else result + self._bias


def make_float8(
    weight: AnyWeight,
    bias: Tensor | None = None,
    *,
    rounding: Rounding = BY_TORCH,
    keeps_floats: bool = False,
    product: RowProduct | None = None,
    **_gated: bool,
) -> Linear:
    """Make a layer (a MakeLinear) from a bfloat16 weight, or from a weight that the checkpoint stores in 8-bit floats.

    `rounding` rounds the inputs, and `product` multiplies them. A weight whose sides are not multiples of 16 becomes a
    plain layer. With `keeps_floats`, so does a weight that is not stored in 8 bits.
    """
    if isinstance(weight, RoundedWeight):
        assert weight.values.dtype == FLOAT8, "integers of a checkpoint must be unpacked before rounding"
        weight = replace(weight, scales=weight.scales[:, None].contiguous(), dtype=torch.bfloat16)
        if _is_odd(weight.values):
            return PlainLinear(weight.unpacked(), bias)
        return Float8Linear(weight, bias, rounding, product)
    assert isinstance(weight, Tensor), "weights of 4 bits, or in blocks, must be unpacked before rounding"
    if keeps_floats or _is_odd(weight):
        return PlainLinear(weight, bias)
    return Float8Linear.of(weight, bias, rounding, product)


def _is_odd(weight: Tensor) -> bool:
    return any(size % _MULTIPLE for size in weight.shape)


def _on_device(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
    """rows [T, k], scales [T, 1], values [n, k], by_output [n, 1] -> [T, n] bfloat16."""
    return torch._scaled_mm(
        rows, values.t(), scale_a=scales, scale_b=by_output.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _as_floats(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
    """Compute the same product on the same numbers, summed in float32."""
    return (rows.float() @ values.float().t() * scales * by_output.t()).to(torch.bfloat16)


def unpacked_product(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
    """Compute the same product in bfloat16, which has every e4m3 number, for devices without products of 8 bits."""
    product = rows.to(torch.bfloat16) @ values.to(torch.bfloat16).t()
    return (product * scales * by_output.t()).to(torch.bfloat16)


FEW_ROWS = 32
"""Rows up to which tiles are multiplied as they are; they are read once for each 8 or 16 rows."""
_ROW_MULTIPLE = 4
"""Rows of a product of blocks: columns of scales hold multiples of 16 bytes, and one row has other strides."""
_OUTPUTS, _DEPTH = 8, 16  # of a tile: outputs, and inputs per inner tile
BLOCK = 128
"""Outputs and inputs of a block that a product takes."""
_SAMPLE, _MANY_ROWS = (256, 512), 300
_ROUNDED_TOLERANCE = 0.1  # where both sides are rounded to 3 bits of mantissa: 0.036 for random numbers
TOLERANCE = 3e-2
"""Largest error of a product, relative to the root mean square of the results."""


@dataclass(frozen=True, eq=False)
class TiledWeight:
    """A weight in the tiles of `_weight_int4pack_mm`.

    Attributes:
        tiles: [n / 8, k / (16 · inner), 32, inner / 2] int32.
        places: Position in its tile [8 · 16 · inner] of each value, by output and input.
        both: [groups, n, 2] bfloat16: the scales, and the added offsets (8 - zero point) * scale.
    """

    tiles: Tensor
    places: Tensor
    both: Tensor
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, int]:
        return self.both.shape[1], len(self.places) // _OUTPUTS * self.tiles.shape[1]

    def values(self) -> Tensor:
        """Return the values [n, k] uint8."""
        down, along, size = *self.tiles.shape[:2], len(self.places)
        pairs = self.tiles.view(torch.uint8).view(down * along, -1)
        values = torch.stack((pairs & 15, pairs >> 4), -1).view(down * along, size).index_select(1, self.places)
        return values.view(down, along, _OUTPUTS, -1).transpose(1, 2).reshape(self.shape)

    def unpacked(self) -> Tensor:
        scales, added = self.both.float().permute(2, 1, 0)
        zeros = (8 - added / scales).nan_to_num(0.0).round()  # exact: rounding has moved them by less than 1 / 32
        return scaled(self.values(), zeros, scales, self.dtype)

    def data(self) -> Tensor:
        return as_bytes(self.tiles)

    def on(self, data: Tensor) -> Self:
        return replace(self, tiles=data.view(torch.int32).view(self.tiles.shape))


class Tiles:
    """Operators of 4 bits; tests replace them.

    Args:
        pack: (values [n, k / 2] uint8, the first of two inputs in the upper bits, inner) -> tiles.
        multiply: (x [T, k], tiles, group, scales and zeros [groups, n, 2]) -> [T, n].
        unpack: (tiles, places, both) -> [n, k], as of `TiledWeight`; None: by torch, in several passes.
    """

    def __init__(
        self,
        pack: Callable[..., Tensor] = torch.ops.aten._convert_weight_to_int4pack,
        multiply: Callable[..., Tensor] = torch.ops.aten._weight_int4pack_mm,
        unpack: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._pack, self._multiply, self._unpack = pack, multiply, unpack
        self._places = cache(self._find_places)

    def weight_of(self, weight: PackedWeight) -> TiledWeight | None:
        """Return the weight in tiles; None if tiles do not divide it, or it is not of bfloat16."""
        n, k = len(weight.values), 2 * weight.values.shape[1]
        inner = next((each for each in (8, 4, 2) if k % (each * _DEPTH) == 0), 0)
        if weight.dtype != torch.bfloat16 or n % _OUTPUTS or not inner:
            return None
        scales, swapped = weight.scales.to(weight.dtype), weight.values >> 4 | weight.values << 4
        added = (8 - weight.zeros.float()) * scales.float()
        both = torch.stack((scales, added.to(weight.dtype)), -1).transpose(0, 1).contiguous()
        tiles = self._pack(swapped, inner)
        return TiledWeight(tiles, self._places(inner, weight.values.device), both)

    def product(self, weight: TiledWeight, x: Tensor) -> Tensor:
        return self._multiply(x, weight.tiles, weight.shape[1] // len(weight.both), weight.both)

    def unpacked(self, weight: TiledWeight) -> Tensor:
        """Return the weight [n, k]."""
        unpack = self._unpack
        return weight.unpacked() if unpack is None else unpack(weight.tiles, weight.places, weight.both)

    def _find_places(self, inner: int, device: torch.device) -> Tensor:
        """Return `TiledWeight.places`, by packing a tile whose values are the digits of their own places."""
        size = _OUTPUTS * _DEPTH * inner
        numbers = torch.arange(size, device=device).view(_OUTPUTS, -1)
        found = torch.zeros(size, dtype=torch.int64, device=device)
        for digit in range(3):
            values = (numbers >> 4 * digit & 15).to(torch.uint8)
            pairs = self._pack(values[:, ::2] << 4 | values[:, 1::2], inner).view(torch.uint8).flatten()
            found |= torch.stack((pairs & 15, pairs >> 4), -1).flatten().long() << 4 * digit
        return found.argsort()


class Blocks:
    """Products of 8-bit floats with a scale per block of 128 x 128; inputs are rounded in groups of 128."""

    def __init__(self, rounding: Rounding = BY_TORCH, multiply: Callable[..., Tensor] | None = None) -> None:
        self._rounding, self._multiply = rounding, multiply or _scaled_product

    def takes(self, weight: BlockWeight) -> bool:
        return weight.block == (BLOCK, BLOCK) and weight.dtype == torch.bfloat16

    def product(self, weight: BlockWeight, x: Tensor) -> Tensor:
        num_rows = len(x)
        x = functional.pad(x, (0, 0, 0, -num_rows % _ROW_MULTIPLE))
        values, scales = self._rounding.by_row(x.reshape(-1, BLOCK))
        by_group = scales.view(len(x), -1).t().contiguous().t()  # tokens lie side by side
        return self._multiply(values.view(x.shape), by_group, weight.values, weight.scales)[:num_rows]


def _scaled_product(rows: Tensor, by_group: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """rows [T, k], by_group [T, k / 128], values [n, k], scales [n / 128, padded] -> [T, n] bfloat16."""
    kinds = functional.ScalingType
    return functional.scaled_mm(
        rows, values.t(), by_group, kinds.BlockWise1x128, scales.t(), kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


class CompactLinear(StoredLinear):
    """A `Linear` on a weight in few bits, with the methods of a `StoredWeight`.

    `product` multiplies up to `most_rows` rows. For more, `unpack` makes the weight dense, by default `unpacked` of it.
    """

    def __init__(
        self,
        weight: Any,
        bias: Tensor | None,
        product: Callable[[Any, Tensor], Tensor] | None = None,
        most_rows: float = torch.inf,
        unpack: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__(weight, bias)
        self._product, self._most_rows, self._unpack = product, most_rows, unpack

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._product is None or len(rows) > self._most_rows:
            weight = self._weight.unpacked() if self._unpack is None else self._unpack(self._weight)
            return functional.linear(x, weight, self._bias)
        y = self._product(self._weight, rows.contiguous())
        return (y if self._bias is None else y + self._bias).view(*x.shape[:-1], self.out_features)

    def outputs_from(self, first: int) -> PlainLinear:
        weight, bias = self.dense_from(first)
        return PlainLinear(weight.clone(), bias)

    def dense_from(self, first: int) -> tuple[Tensor, Tensor | None]:
        return self._weight.unpacked()[first:], None if self._bias is None else self._bias[first:]


def make_compact(
    weight: AnyWeight,
    bias: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    blocks: Blocks | None = None,
    library: Callable[[AnyWeight, Tensor | None], Linear | None] = lambda _weight, _bias: None,
    rounding: Rounding = BY_TORCH,
    group: int = 0,
    head: bool = False,
    gated: bool = False,
) -> Linear:
    """Make a layer on the bits of a checkpoint (a MakeLinear); other weights stay as they are.

    `tiles` and `blocks` are operators that have passed `check`; `library`: `engine.models.humming.make_kept`.
    `group`: weights are random, and are rounded to 4 bits in such groups.
    """
    del gated
    if group and not head and isinstance(weight, Tensor) and (size := group_of(weight.shape[1], group)):
        weight = pack_weight(weight, size)
    if (layer := library(weight, bias)) is not None:
        return layer
    if isinstance(weight, BlockWeight):
        product = blocks.product if blocks is not None and blocks.takes(weight) else None
        return CompactLinear(weight, bias, product)
    if isinstance(weight, PackedWeight):
        tiled = None if tiles is None else tiles.weight_of(weight)
        if tiles is None or tiled is None:
            return CompactLinear(weight, bias)
        return CompactLinear(tiled, bias, tiles.product, FEW_ROWS, tiles.unpacked)
    if isinstance(weight, RoundedWeight):
        return make_float8(weight, bias, rounding=rounding)
    return make_linear(weight, bias)


def check(
    device: torch.device,
    *,
    shapes: Iterable[tuple[int, int]] = (),
    group: int = 0,
    tiles: Tiles | None = None,
    blocks: Blocks | None = None,
    make: Callable[[Tensor], Linear] | None = None,
) -> str:
    """Return how the products on this device differ from those of unpacked weights, one line; empty if they agree.

    `shapes`: outputs and inputs of the weights that will be multiplied, besides a small one. `group`: as of
    `group_of`. `make` makes a layer of 8-bit floats, whose inputs are rounded as well.
    """
    for n, k in dict.fromkeys((_SAMPLE, *shapes)):
        try:
            numbers = torch.Generator(device).manual_seed(0)
            dense, x = (
                torch.randn(size, k, generator=numbers, device=device, dtype=torch.bfloat16) for size in (n, _MANY_ROWS)
            )
            if tiles is not None:
                fault = _fault_of_tiles(tiles, dense, x[:FEW_ROWS], group_of(k, group))
            elif make is not None:
                fault = _fault(make(dense), x, dense, _ROUNDED_TOLERANCE)
            else:
                assert blocks is not None, "nothing to compare"
                block = None if n % BLOCK or k % BLOCK else block_weight(dense)
                fault = "" if block is None else _fault(partial(blocks.product, block), x, block.unpacked(), TOLERANCE)
        except Exception as raised:  # of torch, its libraries, or the driver
            fault = f"raised {type(raised).__name__}: {str(raised).strip().partition(chr(10))[0][:200]}"
        if fault:
            return f"{fault} ({n} x {k})"
    return ""


def _fault_of_tiles(tiles: Tiles, dense: Tensor, x: Tensor, group: int | None) -> str:
    """Return the fault of tiles; empty without one, or if they do not divide the weight."""
    packed = None if group is None else pack_weight(dense, group)
    if packed is None or (weight := tiles.weight_of(packed)) is None:
        return ""
    if not torch.equal(pack_values(weight.values()), packed.values):
        return "values are lost in tiles of 4 bits"
    if not torch.equal(tiles.unpacked(weight), weight.unpacked()):
        return "unpacks other values"
    return _fault(partial(tiles.product, weight), x, packed.unpacked(), TOLERANCE)


def _fault(product: Callable[[Tensor], Tensor], x: Tensor, dense: Tensor, allowed: float) -> str:
    """Compare products of some rows: libraries have other rules for one row and for odd numbers of rows."""
    error = max(error_of(product(x[:rows]), x[:rows], dense) for rows in (1, 3, FEW_ROWS, len(x)))
    return "" if error <= allowed else f"differs from unpacked weights by {error:.2g}"


def block_weight(weight: Tensor) -> BlockWeight:
    """Round a weight [n, k], both multiples of 128, to 8-bit floats in blocks of 128 x 128."""
    n, k = weight.shape
    parts = weight.float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scales = parts.abs().amax((1, 3)).clamp_min(1e-12) / torch.finfo(FLOAT8).max
    values = (parts / scales[:, None, :, None]).to(FLOAT8).view(n, k)
    return BlockWeight.of(values, scales, (BLOCK, BLOCK), weight.dtype)


def error_of(found: Tensor, x: Tensor, dense: Tensor) -> float:
    """Return the error of a product [T, n] of x [T, k] and a weight [n, k]; infinite if it is not finite."""
    expected = x.float() @ dense.float().t()
    return float(((found.float() - expected).square().mean() / expected.square().mean()).sqrt().nan_to_num(torch.inf))
