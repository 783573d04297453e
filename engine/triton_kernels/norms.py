"""Norms, gates of feed-forward layers, rounding of rows, and unpacking of weights.

RMS norm and layer norm. Fused variants add a residual before the norm, normalise the addend, add a second branch, or
round the result to 8-bit floats. Twin: engine.models.torch_ops.

Round input rows of a linear layer to 8-bit floats (e4m3), with one scale per row. Twin: engine.models.compact.

Unpack a weight of 4 bits in one pass, for the steps whose rows its tiles do not multiply. Twin: `TiledWeight.unpacked`.

Gate of a feed-forward layer: silu(gate) * up (SwiGLU) or gelu_tanh(gate) * up (GeGLU), from one projection. SwiGLU
can be rounded to 8-bit floats for a next layer that computes with them.

ReLU and GELU alone need no kernel. Both follow a plain projection: torch._addmm_activation lets cuBLASLt apply ReLU and
the tanh form of GELU in its epilogue. For the exact form, torch's operator is already a single pass. Twin:
engine.models.torch_ops.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.triton_kernels import configs

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"


BLOCK = 2048
SMALLEST = 1e-12


@triton.jit
def nearest_float(exact):
    """Round to the values of e4m3, as float32: four binary digits, or steps of 2**-9 below 2**-6; ties to even.

    The following cast then has nothing to round; the cast of the interpreter lacks a carry into the exponent.
    """
    bits = exact.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (exact + 24576.0) - 24576.0  # 1.5 * 2**14, whose last digit is 2**-9
    return tl.where(tl.abs(exact) < 0.015625, small, normal)


@triton.jit
def round_part(part, scale):
    """Return the e4m3 values nearest to part / scale, as float32 [n]; part is float32 [n]."""
    exact = tl.div_rn(part, tl.zeros_like(part) + scale)
    return nearest_float(tl.minimum(tl.maximum(exact, -448.0), 448.0))


@triton.jit
def scale_of(top, given, SMALLEST: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Return the scale of a row with maximum `top`, unless a scale is given."""
    scale = tl.maximum(top, SMALLEST) * (1.0 / 448.0)
    if HAS_SCALE:
        scale = tl.load(given)
    return scale


@triton.jit
def round_rows_kernel(x, values, scales, width, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): find the maximum, then round the values; the second pass reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), tl.float32)
    bad = tl.zeros((BLOCK,), tl.float32)  # becomes NaN if a value is not finite, which a maximum would ignore
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(part))
        bad += part - part
    scale = tl.maximum(tl.max(top, 0), SMALLEST) * (1.0 / 448.0) + tl.sum(bad, 0)
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        exact = tl.div_rn(part, tl.zeros_like(part) + scale)
        tl.store(values + row * width + columns, nearest_float(exact).to(values.dtype.element_ty), mask=columns < width)


@triton.jit
def scale_rows_kernel(x, given, values, scales, width, BLOCK: tl.constexpr):
    """Program (row), in one pass. `given` [1] is the scale of all rows; rows that are not finite get NaN."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(given)
    bad = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        bad += part - part
        cut = round_part(part, scale)
        tl.store(values + row * width + columns, cut.to(values.dtype.element_ty), mask=columns < width)
    tl.store(scales + row, scale + tl.sum(bad, 0))


def empty_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Allocate values [T, width] e4m3 and scales [T, 1] float32 for the rows of x."""
    values = torch.empty((len(x), width), dtype=torch.float8_e4m3fn, device=x.device)
    return values, x.new_empty((len(x), 1), dtype=torch.float32)


def scale_rows(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] with one scale [1] to values [T, k] e4m3, clipped to 448, and scales [T, 1].

    The scale of a row that is not finite is NaN.
    """
    x = x.contiguous()
    values, scales = empty_rows(x, x.shape[1])
    if len(x):
        scale_rows_kernel[(len(x),)](
            x, scale, values, scales, x.shape[1], BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scales


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, k] to values [T, k] e4m3 and scales [T, 1] float32; the scale of a row that is not finite is NaN."""
    x = x.contiguous()
    values, scales = empty_rows(x, x.shape[1])
    if len(x):
        round_rows_kernel[(len(x),)](
            x, values, scales, x.shape[1], SMALLEST=SMALLEST, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scales


_TILE_ROWS, _TILES_EACH = 8, 4
"""Outputs of a tile, and tiles of one program, which lie side by side along the inputs."""


@triton.jit
def unpack_tiles_kernel(
    tiles, places, both, out, num_tiles, along, outputs, group,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program per TILES tiles of ROWS outputs and DEPTH inputs."""
    spot = tl.arange(0, ROWS * DEPTH)
    place = tl.load(places + spot).to(tl.int32)
    for step in range(TILES):
        tile = (tl.program_id(0) * TILES + step).to(tl.int64)
        inside = tile + 0 * spot < num_tiles  # a block: the interpreter takes no scalar as a mask
        pair = tl.load(tiles + tile * (ROWS * DEPTH // 2) + place // 2, mask=inside, other=0)
        value = (tl.where(place % 2 == 0, pair & 15, pair >> 4)).to(tl.float32)
        row, column = tile // along * ROWS + spot // DEPTH, tile % along * DEPTH + spot % DEPTH
        at = (column // group * outputs + row) * 2
        scale = tl.load(both + at, mask=inside, other=1.0).to(tl.float32)
        added = tl.load(both + at + 1, mask=inside, other=0.0).to(tl.float32)
        zero = tl.where(scale == 0.0, 0.0, tl.floor(8.5 - added / tl.where(scale == 0.0, 1.0, scale)))
        result = ((value - zero) * scale).to(out.dtype.element_ty)
        tl.store(out + row * (along * DEPTH) + column, result, mask=inside)


def unpack_tiles(tiles: Tensor, places: Tensor, both: Tensor) -> Tensor:
    """Return the weight [n, k] bfloat16 of tiles of 4 bits; the arguments are those of a `TiledWeight`."""
    down, along = tiles.shape[:2]
    depth, outputs = len(places) // _TILE_ROWS, both.shape[1]
    out = both.new_empty((outputs, along * depth))
    unpack_tiles_kernel[(triton.cdiv(down * along, _TILES_EACH),)](
        tiles.view(torch.uint8), places, both, out, down * along, along, outputs, along * depth // len(both),
        DEPTH=depth, ROWS=_TILE_ROWS, TILES=_TILES_EACH, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def source_row(row, rows, HAS_ROWS: tl.constexpr):
    """Return the input row from which output row `row` is computed."""
    if HAS_ROWS:
        row = tl.load(rows + row).to(tl.int64)
    return row


@triton.jit
def normed_row(values, weight, columns, width, eps):
    """Return the norm of a row [BLOCK] float32 that is zero beyond its width."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    return values * scale * tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x, inner, weight, residual, rows, out, total_out, x_stride, residual_stride, width, eps,
    HAS_INNER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output row."""
    row = tl.program_id(0).to(tl.int64)
    source = source_row(row, rows, HAS_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + source * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = normed_row(values, inner, columns, width, eps).to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + source * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        # Round the sum before the norm: the next layer reads the rounded residual.
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    normed = normed_row(values, weight, columns, width, eps)
    tl.store(out + row * width + columns, normed.to(kind), mask=mask)


@triton.jit
def rms_norm_rounded_kernel(
    x, inner, weight, residual, rows, given, out, scales, total_out, x_stride, residual_stride, width, eps,
    HAS_INNER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_SCALE: tl.constexpr,
    SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output row. The unrounded norm is rounded to its own type first, then to 8 bits."""
    row = tl.program_id(0).to(tl.int64)
    source = source_row(row, rows, HAS_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = x.dtype.element_ty
    values = tl.load(x + source * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_INNER:
        values = normed_row(values, inner, columns, width, eps).to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + source * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    normed = normed_row(values, weight, columns, width, eps).to(kind).to(tl.float32)
    step = scale_of(tl.max(tl.abs(normed), 0), given, SMALLEST, HAS_SCALE)
    tl.store(scales + row, step + tl.sum(normed - normed, 0))  # NaN if any value is not finite
    tl.store(out + row * width + columns, round_part(normed, step).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    rows: Tensor | None = None,
    inner: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean(x²) + eps) * weight for the sum of residual (if any) and x, and that sum.

    Shapes: x, residual [n, width], rows contiguous; weight [width]. With `rows [m]` int32 both results are of these
    rows only, [m, width]. With `inner [width]` x is normalised by it before the addition.
    """
    count, width = check_rows(x, residual, weight, inner, rows=rows), x.shape[1]
    out = x.new_empty((count, width))
    total = x if residual is None else x.new_empty((count, width))
    other = x if residual is None else residual
    if count:
        config = configs.row_config(width)
        rms_norm_kernel[(count,)](
            x, weight if inner is None else inner, weight, other, x if rows is None else rows, out, total, x.stride(0),
            other.stride(0), width, eps, HAS_INNER=inner is not None, HAS_RESIDUAL=residual is not None,
            HAS_ROWS=rows is not None, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return out, total


def add_rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: Tensor | None,
    rows: Tensor | None = None,
    inner: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Like `add_rms_norm`, with the norm as 8-bit floats: values [n, width] e4m3 and scales [n, 1] float32, per row or
    `scale` [1]."""
    count, width = check_rows(x, residual, weight, inner, rows=rows), x.shape[1]
    out, scales = empty_rows(x if rows is None else rows, width)
    total = x if residual is None else x.new_empty((count, width))
    other = x if residual is None else residual
    if count:
        config = configs.row_config(width)
        rms_norm_rounded_kernel[(count,)](
            x, weight if inner is None else inner, weight, other, x if rows is None else rows,
            scales if scale is None else scale, out, scales, total, x.stride(0), other.stride(0), width, eps,
            HAS_INNER=inner is not None, HAS_RESIDUAL=residual is not None, HAS_ROWS=rows is not None,
            HAS_SCALE=scale is not None, SMALLEST=SMALLEST, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return (out, scales), total


def check_rows(x: Tensor, residual: Tensor | None, *weights: Tensor | None, rows: Tensor | None = None) -> int:
    """Assert the common contract of the norms; return the number of output rows."""
    for name, value in (("x", x), ("residual", residual)):
        if value is not None:
            assert value.dim() == 2 and value.shape == x.shape, f"{name}: {value.shape}, not {x.shape}"
            assert value.dtype == x.dtype and value.stride(1) == 1, f"{name}: contiguous rows of {x.dtype}"
    for weight in weights:
        assert weight is None or (weight.shape == x.shape[1:] and weight.is_contiguous()), f"weight: [{x.shape[1]}]"
    assert rows is None or (rows.dtype == torch.int32 and rows.is_contiguous()), "rows: [m] int32, contiguous"
    return len(x if rows is None else rows)


@triton.jit
def layer_norm_kernel(
    x, beside, weight, bias, residual, rows, out, total_out, x_stride, beside_stride, residual_stride, width, eps,
    HAS_BESIDE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output row. The variance is taken around the mean, in a second pass over registers."""
    row = tl.program_id(0).to(tl.int64)
    source = source_row(row, rows, HAS_ROWS)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    kind = out.dtype.element_ty
    values = tl.load(x + source * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_BESIDE:
        values += tl.load(beside + source * beside_stride + columns, mask=mask, other=0.0).to(tl.float32)
        values = values.to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        rest = tl.load(residual + source * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        total = (values + rest).to(kind)
        tl.store(total_out + row * width + columns, total, mask=mask)
        values = total.to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    normed = centred * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    normed += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed.to(kind), mask=mask)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    rows: Tensor | None = None,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias for the sum of residual (if any) and x, and that sum.

    Shapes: x, residual, beside [n, width], rows contiguous; weight, bias [width]. `rows`: as in `add_rms_norm`. With
    `beside`, x + beside replaces x.
    """
    count, width = check_rows(x, residual, weight, bias, rows=rows), x.shape[1]
    check_rows(x, beside)
    out = x.new_empty((count, width))
    total = x if residual is None else x.new_empty((count, width))
    other, second = (x if each is None else each for each in (residual, beside))
    if count:
        config = configs.row_config(width)
        layer_norm_kernel[(count,)](
            x, second, weight, bias, other, x if rows is None else rows, out, total,
            x.stride(0), second.stride(0), other.stride(0), width, eps, HAS_BESIDE=beside is not None,
            HAS_RESIDUAL=residual is not None, HAS_ROWS=rows is not None, BLOCK=config.block_n, **config.options,
        )  # fmt: skip
    return out, total


@triton.jit
def gated(x, row, x_stride, width, columns, GELU: tl.constexpr):
    """Return silu(gate) * up, or gelu_tanh(gate) * up, of some columns, in the type of x; zeros beyond the width."""
    mask = columns < width
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y))
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-inner)) * up).to(x.dtype.element_ty)


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * width + columns, gated(x, row, x_stride, width, columns, GELU), mask=columns < width)


@triton.jit
def silu_and_mul_rounded_kernel(
    x, given, out, scales, x_stride, width, HAS_SCALE: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row): find the maximum unless a scale is given, then round the values."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), tl.float32)
    if not HAS_SCALE:
        for start in range(0, width, BLOCK):
            part = gated(x, row, x_stride, width, start + tl.arange(0, BLOCK), False).to(tl.float32)
            top = tl.maximum(top, tl.abs(part))
    step = scale_of(tl.max(top, 0), given, SMALLEST, HAS_SCALE)
    bad = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        part = gated(x, row, x_stride, width, columns, False).to(tl.float32)
        bad += part - part
        tl.store(out + row * width + columns, round_part(part, step).to(out.dtype.element_ty), mask=columns < width)
    tl.store(scales + row, step + tl.sum(bad, 0))  # NaN if any value is not finite


def silu_and_mul_rounded(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up as 8-bit floats: values [n, width] e4m3 and scales [n, 1] float32, per row or `scale` [1].
    x as in `silu_and_mul`."""
    assert x.dim() == 2 and x.shape[1] % 2 == 0 and x.stride(1) == 1, f"x: rows of 2 * width, not {x.shape}"
    width = x.shape[1] // 2
    out, scales = empty_rows(x, width)
    if len(x):
        silu_and_mul_rounded_kernel[(len(x),)](
            x, scales if scale is None else scale, out, scales, x.stride(0), width, HAS_SCALE=scale is not None,
            SMALLEST=SMALLEST, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return out, scales


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [n, width]. x [n, 2 * width], gate first, rows contiguous."""
    return _launch(x, gelu=False)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up, [n, width]. x [n, 2 * width], gate first, rows contiguous."""
    return _launch(x, gelu=True)


def _launch(x: Tensor, *, gelu: bool) -> Tensor:
    assert x.dim() == 2 and x.shape[1] % 2 == 0 and x.stride(1) == 1, f"x: rows of 2 * width, not {x.shape}"
    width = x.shape[1] // 2
    out = x.new_empty((len(x), width))
    if len(x):
        config = configs.FLAT
        grid = (len(x), -(-width // config.block_n))
        silu_and_mul_kernel[grid](x, out, x.stride(0), width, BLOCK=config.block_n, GELU=gelu, **config.options)
    return out
