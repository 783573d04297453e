"""The operations of the native kernels, one by one, against torch in double precision."""

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from native_build import library_file, library_of, native_library
from support.tables import for_each
from torch import Tensor
from torch.nn import functional

from engine.errors import ConfigError
from engine.execution.cpu.native.library import (
    TYPES,
    Epilogue,
    Kind,
    Level,
    Library,
    Op,
    StepError,
    Tape,
    TapeShape,
    TapeStep,
    Team,
    activation_dtype,
    load,
)
from engine.execution.cpu.native.linear import Native, NativeLinear, rows_for, stride_of

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]  # the first test may have to build the library

BF16 = torch.bfloat16
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LEVELS = [*itertools.product((Level.AVX2, Level.AVX512), FLOATS), (Level.BF16, BF16), (Level.AMX, BF16)]


@cache
def team_of(library: Library) -> Team:
    return Team(library, 2)


emulation = pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.slow)])
"""Levels of this processor, and the others, for which a library with emulated instructions is built."""


def native_of(level: Level, dtype: torch.dtype, emulated: bool | None = None) -> Native:
    """Return kernels of a level; skip if `emulated` is given and the processor has the level or lacks it."""
    if emulated is not None and emulated is (level in native_library().levels()):
        pytest.skip("not a level of this processor" if not emulated else "a level of this processor")
    library = library_of(level)
    native = Native(library, level, team_of(library))
    assert native.level_for(dtype) == level
    return native


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, steps: float = 2.0, scale: float = 1.0) -> None:
    """Within a few steps of the type at the size of the values, and the float32 sums behind them."""
    allowed = steps * torch.finfo(dtype).eps * (expected.abs() + scale) + 1e-5 * scale
    wrong = (actual.double() - expected).abs() > allowed
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()}, worst {(actual - expected).abs().max()}"


# ---- linear layers


@emulation
@for_each(("level", "dtype"), LEVELS)
@for_each(("rows", "n", "k"), [(1, 64, 96), (2, 31, 40), (5, 100, 32), (13, 7, 33), (33, 200, 130)])
def test_linear(emulated: bool, level: Level, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    native = native_of(level, dtype, emulated)
    x, weight, bias = random(rows, k, dtype=dtype), random(n, k, seed=1, dtype=dtype), random(n, seed=2, dtype=dtype)
    for each in (None, bias):
        layer = NativeLinear(native, weight, each)
        expected = functional.linear(x.double(), weight.double(), None if each is None else each.double())
        close(layer(x), expected, dtype, scale=math.sqrt(k))


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Epilogue, Callable[[Tensor], Tensor]] = {
    Epilogue.PLAIN: lambda x: x,
    Epilogue.GELU: functional.gelu,
    Epilogue.GELU_TANH: gelu_tanh,
    Epilogue.RELU: torch.relu,
}


def run_linear(native: Native, layer: NativeLinear, x: Tensor, epilogue: Epilogue) -> Tensor:
    """Run the layer with an epilogue as an operation of the library."""
    level = native.level_for(layer.dtype)
    op = layer.op(epilogue)
    rows = torch.zeros(rows_for(len(x)), op.in_stride, dtype=activation_dtype(level))
    rows[: len(x), : layer.in_features] = x
    width = layer.out_features // 2 if epilogue.gates else layer.out_features
    out = torch.zeros(len(x), op.out_stride, dtype=activation_dtype(level))
    op.input, op.out = rows.data_ptr(), out.data_ptr()
    native.library.linear(level, layer.dtype, op, len(x), native.team)
    assert not bool(out[:, width:].any()), "padding was written"
    return out[:, :width]


@emulation
@for_each(("level", "dtype"), LEVELS)
@for_each("epilogue", ACTIVATIONS)
def test_activations(emulated: bool, level: Level, dtype: torch.dtype, epilogue: Epilogue) -> None:
    """Over all magnitudes: the outputs of an identity are -30 .. 30, and the ends of exp."""
    native = native_of(level, dtype, emulated)
    x = torch.cat((torch.linspace(-30, 30, 90), torch.tensor([-100.0, 100, 0, -0.0, 1e-6, -1e-6]))).to(dtype)[:, None]
    layer = NativeLinear(native, torch.ones(17, 1, dtype=dtype), None)
    expected = ACTIVATIONS[epilogue](x.double()).expand(-1, 17)
    close(run_linear(native, layer, x, epilogue), expected, dtype, scale=0.05)


@emulation
@for_each(("level", "dtype"), LEVELS)
@for_each(("rows", "inner", "bias"), [(1, 88, False), (7, 40, True), (40, 17, True)])
def test_swiglu(emulated: bool, level: Level, dtype: torch.dtype, rows: int, inner: int, bias: bool) -> None:
    native = native_of(level, dtype, emulated)
    weight, x = random(2 * inner, 64, seed=1, dtype=dtype) / 4, random(rows, 64, dtype=dtype)
    biases = random(2 * inner, seed=2, dtype=dtype) if bias else None
    layer = NativeLinear(native, weight, biases, gated=True)
    expected = functional.linear(x.double(), weight.double(), None if biases is None else biases.double())
    gate, up = expected.chunk(2, -1)
    close(run_linear(native, layer, x, Epilogue.SWIGLU), functional.silu(gate) * up, dtype, steps=8, scale=4.0)
    close(run_linear(native, layer, x, Epilogue.GEGLU), gelu_tanh(gate) * up, dtype, steps=8, scale=4.0)
    close(layer(x), expected, dtype, scale=4.0)


@emulation
@for_each(("level", "dtype"), LEVELS)
@for_each("softcap", [0.0, 3.0])
def test_logits_are_capped(emulated: bool, level: Level, dtype: torch.dtype, softcap: float) -> None:
    native, kind = native_of(level, dtype, emulated), activation_dtype(level)
    x, weight = random(1, 64, dtype=dtype), random(70, 64, seed=1, dtype=dtype) / 4
    layer = NativeLinear(native, weight, None)
    given = torch.zeros(rows_for(1), stride_of(64), dtype=kind)
    given[:1, :64] = x
    op = layer.op(Epilogue.LOGITS)
    op.input, op.sampled, op.softcap = given.data_ptr(), 1, softcap
    logits, best, best_id = torch.zeros(1, 70), np.zeros(1, np.float32), np.zeros(1, np.int64)
    results = {"logits": logits.data_ptr(), "best": best.ctypes.data, "best_id": best_id.ctypes.data}
    run_ops(native, dtype, [op, Op(kind=Kind.BEST)], 1, samples=1, results={**results, "logits_stride": 70})
    expected = functional.linear(x.double(), weight.double())
    if softcap:
        expected = torch.tanh(expected / softcap) * softcap
    close(logits, expected, dtype, steps=4, scale=4.0)
    assert best[0] == logits.max() and best_id[0] == logits[0].argmax()


# ---- attention


def run_attention(
    native: Native,
    dtype: torch.dtype,
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
    spare: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of chunks (start, length), each of a row of its own, to random keys and values in a scattered pool that
    holds NaN elsewhere, before the windows too. `value_dim`: of V, if not `dim`; `spare`: elements that a cell has
    beyond the wider of K and V. Gives what came out and what should have."""
    layers, layer = 2, 1
    dims = dim, value_dim or dim
    cell = kv_heads * max(dims) + spare
    blocks = [-(-(start + length) // block) for start, length in chunks]
    units = 2 * sum(blocks) + 3
    order = np.random.default_rng(0).permutation(units)
    pool = torch.full((units, layers, block, cell), math.nan, dtype=dtype)
    tables = np.zeros((2, len(chunks), max(blocks)), dtype=np.int64)
    total, width = sum(length for _, length in chunks), heads * dim + kv_heads * sum(dims)
    level = native.level_for(dtype)
    qkv = random(total, stride_of(width), seed=3, dtype=dtype).to(activation_dtype(level))
    out = torch.zeros(total, stride_of(heads * dims[1]), dtype=activation_dtype(level))
    expected = torch.empty(total, heads * dims[1], dtype=torch.float64)
    given = iter(order.tolist())
    first = 0
    for row, (start, length) in enumerate(chunks):
        past = [random(start + length, kv_heads, d, seed=10 * row + n, dtype=dtype) for n, d in enumerate(dims, 1)]
        for which, values in enumerate(past):
            for index in range(blocks[row]):
                part = values[index * block : (index + 1) * block].clone()
                part[: max(0, start + 1 - window - index * block) if window else 0] = math.nan
                unit = next(given)
                tables[which, row, index] = unit
                pool[unit, layer, : len(part), : part[0].numel()] = part.flatten(1)
        k, v = (values.double().repeat_interleave(heads // kv_heads, dim=1) for values in past)
        q = qkv[first : first + length, : heads * dim].double().view(length, heads, dim)
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        past_by = start + torch.arange(length)[:, None] - torch.arange(start + length)
        unseen = (past_by < 0) | (past_by >= (window or start + length))
        scores = scores.masked_fill(unseen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(heads, length, 1)), -1)
        weights = scores.softmax(-1)[..., : start + length]
        expected[first : first + length] = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        first += length
    longest = max(start + length for start, length in chunks)
    shape = TapeShape(
        heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=dims[1], cell=cell, hidden=8, layers=layers, vocab=5,
        block_size=block, pool_units=units, num_rows=len(chunks), max_blocks=tables.shape[2], max_positions=longest,
        max_tokens=total, max_samples=1, level=level, type=TYPES[dtype], scale=dim**-0.5,
    )  # fmt: skip
    attend = Op(kind=Kind.ATTEND, layer=layer, input=qkv.data_ptr(), in_stride=qkv.stride(0), n=window)
    merge = Op(kind=Kind.MERGE, layer=layer)
    attend.softcap, attend.other = softcap, None if sinks is None else sinks.data_ptr()
    merge.other = attend.other
    attend.out = merge.out = out.data_ptr()
    attend.out_stride = merge.out_stride = out.stride(0)
    told = np.array([(row, start, length, 0) for row, (start, length) in enumerate(chunks)], dtype=np.int64)
    tokens, counts = np.zeros((len(chunks), longest), dtype=np.int64), np.array(blocks, dtype=np.int64)
    step = TapeStep(
        num_chunks=len(chunks), token_stride=longest, table_stride=tables.shape[2], chunks=told.ctypes.data,
        tokens=tokens.ctypes.data, k_table=tables[0].ctypes.data, v_table=tables[1].ctypes.data,
        num_blocks=counts.ctypes.data, pool=pool.data_ptr(),
    )  # fmt: skip
    Tape(native.library, shape, [attend, merge]).run(native.team, step)
    return out[:, : heads * dims[1]], expected


MIXES = [
    [(0, 1), (1, 1), (15, 1), (16, 1), (63, 1), (200, 1)],
    [(255, 1), (256, 1), (512, 1), (1500, 1)],  # long decodes, split
    [(0, 2), (30, 7), (17, 3)],
    [(0, 8), (0, 64), (0, 65), (100, 40), (37, 130)],  # tiles
    [(90, 1), (0, 50), (5, 4), (700, 1), (64, 64)],
]
SINKS = torch.tensor([-9.0, 0.0, 0.5, 2.0, 6.0, 120.0])
"""Below every score, among them, and above all: so far that the exponential of the difference is none."""
ATTENTION: list[dict[str, Any]] = [
    *({"chunks": chunks} for chunks in MIXES),
    # whole contexts, parts, and parts before a window; a sink counts once
    *(
        {"window": window, "softcap": softcap, "sinks": SINKS if sinks else None}
        for window, softcap, sinks in (
            (0, 0.0, True), (0, 0.7, False), (1, 0.0, False), (1, 0.7, True), (60, 0.0, False), (60, 0.7, True),
            (600, 0.0, True), (600, 0.7, False),
        )
    ),
    *(
        {
            "heads": heads, "kv_heads": kv_heads, "dim": dim, "block": block,
            "chunks": [(70, 1), (0, 33), (20, 5), (100, 20), (530, 1)],
        }
        for heads, kv_heads, dim, block in (
            (4, 4, 8, 1), (9, 3, 40, 2), (8, 1, 80, 4), (2, 2, 96, 8), (14, 2, 128, 32), (5, 1, 12, 16),
            (2, 1, 256, 64),
        )
    ),
    # values narrower than keys, as latent attention has, and wider; cells wider than both, with NaN behind them
    *(
        {
            "heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim, "block": block, "spare": spare,
            "window": 90, "sinks": torch.linspace(-2, 3, heads) if sinks else None,
            "chunks": [(70, 1), (0, 33), (20, 5), (100, 40), (1100, 1)],
        }
        for heads, kv_heads, dim, value_dim, block, spare in (
            (4, 4, 192, 128, 16, 0), (6, 2, 96, 32, 16, 32), (4, 2, 32, 64, 32, 0), (3, 3, 12, 8, 4, 5),
        )
        for sinks in (False, True)
    ),
]  # fmt: skip


@emulation
@for_each(("level", "dtype"), LEVELS)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(emulated: bool, level: Level, dtype: torch.dtype, case: dict[str, Any]) -> None:
    chunks = [(90, 1), (0, 50), (5, 4), (1500, 1), (1100, 3), (200, 150), (0, 1)]
    usual = {"chunks": chunks, "heads": 6, "kv_heads": 2, "dim": 64, "block": 16}
    actual, expected = run_attention(native_of(level, dtype, emulated), dtype, **usual | case)
    close(actual, expected, dtype, steps=4, scale=0.5)
    if case.get("sinks") is SINKS:
        assert not bool(actual.view(-1, 6, 64)[:, 5].any()), "all of the weight lies on the sink"


# ---- additions, norms and rotations


def run_ops(
    native: Native,
    dtype: torch.dtype,
    ops: list[Op],
    tokens: int,
    *,
    samples: int = 0,
    parts: Sequence[tuple[int, int]] = (),
    results: Mapping[str, int] | None = None,
    **changes: object,
) -> Tensor:
    """Operations, all or `parts` one after the other, on a step of so many tokens of one request, in a pool of one row;
    gives its cells of k, and of v."""
    sizes: dict[str, Any] = {"max_positions": 12, **changes}
    room = sizes["max_positions"]
    shape = tiny_shape(
        level=native.level_for(dtype), type=TYPES[dtype], max_tokens=tokens, num_rows=1, pool_units=room // 2,
        max_blocks=room // 4, **sizes,
    )  # fmt: skip
    pool = torch.zeros(shape.pool_units, shape.block_size, shape.cell, dtype=dtype)
    chunk, tokens_of = np.array([(0, 0, tokens, samples)], np.int64), np.zeros((1, room), np.int64)
    tables, counts = np.arange(room // 2, dtype=np.int64).reshape(2, -1), np.array([room // 4], np.int64)
    step = TapeStep(
        num_chunks=1, token_stride=room, table_stride=room // 4, chunks=chunk.ctypes.data,
        tokens=tokens_of.ctypes.data, k_table=tables[0].ctypes.data, v_table=tables[1].ctypes.data,
        num_blocks=counts.ctypes.data, pool=pool.data_ptr(), **(results or {}),
    )  # fmt: skip
    tape = Tape(native.library, shape, ops)
    tape.begin(native.team, step)
    for first, last in parts or [(0, len(ops))]:
        tape.run_ops(native.team, first, last)
    return pool.view(2, room, shape.cell)


@emulation
@for_each(("level", "dtype"), LEVELS)
def test_an_addition_with_a_norm(emulated: bool, level: Level, dtype: torch.dtype) -> None:
    native, kind = native_of(level, dtype, emulated), activation_dtype(level)
    x, delta, weight = random(5, 40, dtype=dtype), random(5, 40, seed=1, dtype=dtype), random(40, seed=2)
    rows, addend, out = x.to(kind, copy=True), delta.to(kind), torch.full((5, 40), 7.0, dtype=kind)
    op = Op(kind=Kind.NORM, k=40, in_stride=40, out_stride=40, input=addend.data_ptr(), residual=rows.data_ptr())
    op.out, op.weight, op.eps = out.data_ptr(), weight.data_ptr(), 1e-5
    run_ops(native, dtype, [op], 5)
    total = x.double() + delta.double()
    close(rows, total, dtype)
    close(out, functional.rms_norm(total, (40,), weight.double(), 1e-5), dtype, steps=4, scale=4.0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r elements of each head of x [T, heads, d]; cos, sin [T, r / 2]."""
    part, rest = x.tensor_split([2 * cos.shape[1]], dim=-1)
    first, second = part.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@emulation
@for_each(("level", "dtype"), LEVELS)
@for_each(("normed", "turned"), [(False, False), (False, True), (True, True)])
@for_each("rotary_dim", [4, 40, 44])
def test_keys_are_written_normed_and_rotated_or_unchanged(
    emulated: bool, level: Level, dtype: torch.dtype, normed: bool, turned: bool, rotary_dim: int
) -> None:
    """Norm the heads first; rotate some or all of the 44 elements of a head."""
    native, kind, width = native_of(level, dtype, emulated), activation_dtype(level), 4 * 44
    qkv, angles = random(5, width, dtype=dtype), random(5, rotary_dim, seed=1, dtype=dtype).float()
    rows, frequencies, weight = qkv.to(kind, copy=True), torch.zeros(rotary_dim // 2), random(3, 44, seed=2)
    op = Op(kind=Kind.ROPE_KV, out=rows.data_ptr(), out_stride=width)
    if turned:
        op.input = angles.data_ptr()
    if normed:
        op.weight, op.eps = weight.data_ptr(), 1e-5
    changes = {"rotary_dim": rotary_dim, "inverse_frequencies": frequencies.data_ptr(), "rotary_scaling": 1.0}
    k, v = run_ops(native, dtype, [op], 5, head_dim=44, value_dim=44, cell=44, **changes)
    heads, (cos, sin) = qkv.to(torch.float64, copy=True).view(5, 4, 44), angles.double().chunk(2, dim=-1)
    if normed:
        heads[:, :3] = functional.rms_norm(heads[:, :3], (44,), None, 1e-5) * weight.double()
    if turned:
        heads[:, :3] = rotated(heads[:, :3], cos, sin)
    precision = {"scale": 4.0} | ({"steps": 6} if normed else {})
    close(rows.view(5, 4, 44), heads, dtype, **precision)
    close(k[:5], heads[:, 2], dtype, **precision)
    assert torch.equal(v[:5], qkv.view(5, 4, 44)[:, 3])


# ---- refusals


def tiny_shape(**changes: object) -> TapeShape:
    values: dict[str, object] = {
        "heads": 2, "kv_heads": 1, "head_dim": 8, "value_dim": 8, "cell": 8, "hidden": 8, "layers": 1, "vocab": 5,
        "block_size": 4, "pool_units": 6,
        "num_rows": 2, "max_blocks": 3, "max_positions": 12, "max_tokens": 8, "max_samples": 2,
        "level": Level.AVX2, "type": 0, "scale": 1.0,
    }  # fmt: skip
    return TapeShape(**(values | changes))


@for_each(
    ("changes", "named"),
    [
        ({"heads": 3, "kv_heads": 2}, "multiple"),
        ({"block_size": 0}, "positive"),
        ({"rotary_dim": 10}, "rotary_dim"),
        ({"rotary_dim": 4}, "frequencies"),
        ({"type": 7}, "type"),
        ({"value_dim": 0}, "positive"),
        ({"value_dim": 9}, "narrower"),
        ({"cell": 7}, "narrower"),
        ({"value_dim": 4, "int8_cache": 1}, "8 bits"),
        ({"level": 9}, "level"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Tape(native_library(), tiny_shape(**changes), [Op(kind=Kind.BEST)])


@for_each(
    ("op", "named"),
    [
        (Op(kind=77), "unknown"),
        (Op(kind=Kind.BEST, layer=1), "layer"),
        (Op(kind=Kind.LINEAR, n=8, k=8, in_stride=8), "padded"),
        (Op(kind=Kind.LINEAR, n=8, k=8, in_stride=32), "without input"),
        (Op(kind=Kind.ATTEND), "attention"),
        (Op(kind=Kind.ATTEND, softcap=-1.0), "softcap below zero"),
        (Op(kind=Kind.LINEAR, n=8, k=8, in_stride=32, softcap=math.nan, input=1, weight=1), "softcap below zero"),
        (Op(kind=Kind.LINEAR, epilogue=Epilogue.GEGLU, n=8, k=8, in_stride=32), "packed in halves"),
        (Op(kind=Kind.EMBED), "embedding"),
        (Op(kind=Kind.NORM, k=8), "norm"),
        (Op(kind=Kind.NORM, k=8, in_stride=8, residual=1, weight=1), "norm: out"),
        (Op(kind=Kind.QUANTIZE), "integers"),
        (Op(kind=Kind.QUANTIZE, int8=1, k=8, in_stride=8), "integers"),
        (Op(kind=Kind.LINEAR, int8=1, n=8, k=8, in_stride=32), "scales"),
        (Op(kind=Kind.LINEAR, int8=3, n=8, k=8, in_stride=32, scales=8), "kind of integers"),
        (Op(kind=Kind.LINEAR, int8=1, group=48, n=8, k=96, in_stride=96, scales=8), "groups of 4 bits"),
        (Op(kind=Kind.QUANTIZE, int8=1, group=64, k=96, input=8, out=8, in_stride=96), "groups of integers"),
        (Op(kind=Kind.LINEAR, int8=2, n=8, k=65568, in_stride=65568, scales=8), "too many inputs"),
    ],
)
def test_a_wrong_operation_is_refused_by_name(op: Op, named: str) -> None:
    with pytest.raises(ConfigError, match=f"operation 0.*{named}"):
        Tape(native_library(), tiny_shape(), [op])


@for_each(
    ("chunk", "change", "named"),
    [
        ((2, 0, 1, 1), None, "chunk"),
        ((-1, 0, 1, 1), None, "chunk"),
        ((0, -1, 1, 1), None, "chunk"),
        ((0, 0, 0, 1), None, "chunk"),
        ((0, 2**62, 2**62, 1), None, "chunk"),
        ((0, 8, 1, 1), None, "chunk"),  # a block more than the row has
        ((0, 0, 9, 1), None, "chunk"),
        ((0, 0, 3, 1), ("tokens", 5), "token"),
        ((0, 0, 3, 1), ("tokens", -1), "token"),
        ((0, 0, 3, 1), ("k_table", 6), "block"),
        ((0, 0, 3, 1), ("v_table", -1), "block"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_before_it_runs(
    chunk: tuple[int, ...], change: tuple[str, int] | None, named: str
) -> None:
    arrays = {"tokens": np.zeros((2, 12), np.int64), "k_table": np.zeros((2, 3), np.int64)}
    arrays |= {"v_table": np.ones((2, 3), np.int64), "num_blocks": np.array([2, 2], np.int64)}
    if change:
        arrays[change[0]][0, 0] = change[1]
    chunks, best, ids = np.array([chunk], np.int64), np.full(2, 7.0, np.float32), np.full(2, 7, np.int64)
    step = TapeStep(num_chunks=1, token_stride=12, table_stride=3, best=best.ctypes.data, best_id=ids.ctypes.data)
    step.chunks = chunks.ctypes.data
    for name, array in arrays.items():
        setattr(step, name, array.ctypes.data)
    with pytest.raises(StepError, match=named):
        Tape(native_library(), tiny_shape(), [Op(kind=Kind.BEST)]).run(team_of(native_library()), step)
    assert (best == 7).all() and (ids == 7).all()


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.cpu.native.library.TapeStep", TapeShape)
    assert ctypes.sizeof(TapeShape) != ctypes.sizeof(TapeStep)
    with pytest.raises(ConfigError, match="another version"):
        Library(library_file())


def test_a_processor_without_any_level_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.cpu.native.library.LIBRARY", library_file())
    monkeypatch.setattr(Library, "levels", lambda _library: [])
    assert load.__wrapped__() == "this processor lacks AVX2, FMA or F16C, which all native kernels need"
