"""Linear layers on integers of 8 bits: kernels against the twin in torch, and whole models against both."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_build import emulating_library, library_of, native_library
from support.fuzz import fuzz
from support.tables import for_each
from test_native_model import Bench, in_turn, load
from test_native_ops import emulation, native_of, random, run_linear
from test_runner import reference_logits
from tiny_models import FAMILY_CASES, model_folder
from torch import Tensor
from torch.nn import functional

from engine.execution.cpu.native.library import Epilogue, Int8, Level, Team
from engine.execution.cpu.native.linear import Native, NativeInt4, NativeInt8
from engine.execution.cpu.native.start import int8_test, start
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.linear import make_packed
from engine.models.quantized import (
    Int4Linear,
    PackedWeight,
    QuantizedLinear,
    RoundedWeight,
    make_quantized,
    pack_weight,
    quantize_rows,
    round_weight,
)

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]  # the first test may have to build the library

BF16 = torch.bfloat16
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
KINDS = [
    *itertools.product((Level.AVX2, Level.AVX512), FLOATS, Int8),
    *itertools.product((Level.BF16, Level.AMX), (BF16,), Int8),
]


def is_here(level: Level, kind: Int8) -> bool:
    """Return whether this processor has the level and the products."""
    return level in native_library().levels() and native_library().int8(level) >= kind


def native_with(level: Level, dtype: torch.dtype, kind: Int8, emulated: bool) -> Native:
    """Return kernels of this processor or of a library that emulates such products; skip the others."""
    if emulated is is_here(level, kind):
        pytest.skip("not of this processor" if not emulated else "of this processor")
    native = native_of(level, dtype)
    if native.library.int8(level) >= kind:
        return native
    library = emulating_library()
    if library.int8(level) < kind:
        pytest.skip("no products of bytes here")
    return Native(library, level, Team(library, 2))


# ---- what integers stand for


def test_integers_are_the_nearest_and_zero_is_zero() -> None:
    x = random(20, 300)
    x[3] = 0.0
    values, scales = quantize_rows(x)
    assert values.abs().max() == 127 and not values[3].any() and scales[3] == 0
    assert bool(((values * scales[:, None] - x).abs() <= scales[:, None] * 0.5001).all())


def test_a_weight_that_is_not_finite_is_refused() -> None:
    weight = random(8, 64)
    weight[1, 1] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        round_weight(weight)


# ---- kernels


SIZES = [(1, 64, 96), (2, 31, 40), (5, 100, 32), (13, 7, 33), (33, 200, 130), (50, 64, 1536)]


@emulation
@for_each(("level", "dtype", "kind"), KINDS)
@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
def test_products_are_those_of_the_twin_to_the_last_bit(
    emulated: bool, level: Level, dtype: torch.dtype, kind: Int8, rows: int, n: int, k: int
) -> None:
    native = native_with(level, dtype, kind, emulated)
    weight, x = random(n, k, seed=1, dtype=dtype), random(rows, k, dtype=dtype)
    x[0] *= 40.0
    integers = round_weight(weight)
    layer, twin = NativeInt8(native, integers, None, kind=kind), QuantizedLinear(integers, None)
    assert torch.equal(layer(x), twin(x))
    bias = random(n, seed=2, dtype=dtype)
    layer, twin = NativeInt8(native, integers, bias, kind=kind), QuantizedLinear(integers, bias)
    torch.testing.assert_close(layer(x), twin(x), rtol=torch.finfo(dtype).eps, atol=1e-5)


@emulation
@for_each(("level", "dtype", "kind"), KINDS)
@pytest.mark.parametrize("k", [4096, 65536])
def test_the_largest_sums_do_not_overflow(emulated: bool, level: Level, dtype: torch.dtype, kind: Int8, k: int) -> None:
    """Everything at the ends of the range, where pairs of products in 16 bits would saturate."""
    native = native_with(level, dtype, kind, emulated)
    values = torch.full((40, k), 127, dtype=torch.int8)
    values[1], values[2, ::2] = -127, -127
    weight = RoundedWeight(values, torch.full((40,), 2.0**-7), dtype)
    layer = NativeInt8(native, weight, None, kind=kind)
    x = torch.full((3, k), 127.0 / 1024).to(dtype)
    x[1] = -x[1]
    assert torch.equal(layer(x), QuantizedLinear(weight, None)(x))


@emulation
@for_each(("level", "dtype", "kind"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_swiglu(emulated: bool, level: Level, dtype: torch.dtype, kind: Int8, bias: bool) -> None:
    native = native_with(level, dtype, kind, emulated)
    weight, x = random(80, 64, seed=1, dtype=dtype) / 4, random(17, 64, dtype=dtype)
    integers, biases = round_weight(weight), random(80, seed=2, dtype=dtype) if bias else None
    layer = NativeInt8(native, integers, biases, True, kind)
    gate, up = QuantizedLinear(integers, biases)(x).double().chunk(2, -1)
    expected = functional.silu(gate) * up
    allowed = 8 * torch.finfo(dtype).eps * (expected.abs() + 1)
    assert bool(((run_linear(native, layer, x, Epilogue.SWIGLU) - expected).abs() <= allowed).all())


@emulation
@pytest.mark.cpu_limit(5)
@fuzz(96)
@given(st.data())
def test_products_of_four_bits_are_those_of_the_twin(emulated: bool, data: st.DataObject) -> None:
    """Of any shape, in groups of 32, 64 and 128 with zero points; a packed weight can be unpacked."""
    if not (kinds := [(level, dtype, kind) for level, dtype, kind in KINDS if is_here(level, kind) is not emulated]):
        pytest.skip("this processor has all of the products")
    level, dtype, kind = data.draw(st.sampled_from(kinds))
    group, gated = data.draw(st.sampled_from((32, 64, 128))), data.draw(st.booleans())
    rows, n, count = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 50)), data.draw(st.integers(1, 9))
    native, bias = native_with(level, dtype, kind, emulated), random(2 * n, seed=2, dtype=dtype)
    generator = torch.Generator().manual_seed(rows)
    values, zeros = (
        torch.randint(0, top, (2 * n, size), generator=generator, dtype=torch.uint8)
        for top, size in ((256, group * count // 2), (16, count))
    )
    scales = torch.exp2(-12 * torch.rand(2 * n, count, generator=generator)).to(torch.bfloat16)
    weight, x = PackedWeight(values, scales, dtype, zeros), random(rows, group * count, dtype=dtype)
    x[0] *= 40.0
    layer, twin = NativeInt4(native, weight, bias, gated, kind), Int4Linear(weight, bias)
    exact = Int4Linear(replace(weight, dtype=torch.float32), bias)(x)
    spread = 1e-6 * x.float().abs() @ weight.dense().abs().t() + 2 * torch.finfo(dtype).eps * exact.abs() + 1e-5
    assert bool(((layer(x).float() - exact).abs() <= spread).all())
    torch.testing.assert_close(layer.weight().dense(), weight.dense(), rtol=0, atol=0)
    first = data.draw(st.integers(0, 2 * n - 1))
    assert torch.equal(layer.dense_from(first)[0], twin.dense_from(first)[0])
    assert torch.equal(layer.outputs_from(first)(x), layer(x)[:, first:])


@emulation
@for_each("kind", Int8)
@for_each("bad", [math.nan, math.inf])
@for_each("bits", [4, 8])
def test_what_is_not_finite_stays_in_its_row(emulated: bool, kind: Int8, bad: float, bits: int) -> None:
    native, weight = native_with(Level.AVX2, BF16, kind, emulated), random(50, 64, dtype=BF16)
    layer = NativeInt8(native, round_weight(weight), None, kind=kind)
    if bits == 4:
        layer = NativeInt4(native, pack_weight(weight), None, kind=kind)
    x = random(20, 64, seed=1, dtype=BF16)
    expected = layer(x)
    x[7, 3] = bad
    result = layer(x)
    assert bool(result[7].isnan().all())
    kept = torch.arange(20) != 7
    assert torch.equal(result[kept], expected[kept])


# ---- whole models


def divergence(exact: Tensor, other: Tensor) -> float:
    """Mean KL divergence of distributions [T, vocab] from the exact ones, in nats."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def by_bench(bench: Bench, cuts: tuple[int, ...]) -> Tensor:
    at, rows = 0, []
    for length in cuts:
        logits = bench.step((0, at, length)).logits
        assert logits is not None
        rows.append(logits[0])
        at += length
    return torch.stack(rows)


CUTS = (20, 9, 1, 1, 5, 1, 1, 12, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "level"), in_turn(FAMILY_CASES, [Level.AVX2], [Level.AVX512]))
@pytest.mark.parametrize("bits", [4, 8])
def test_every_family_is_as_far_from_float32_as_the_twin_is(name: str, level: Level, bits: int) -> None:
    spec, dense = load(name)
    folder = model_folder(name)
    native = Native(library_of(level), level, Team(library_of(level), 2))
    make, by_torch = (
        (native.int8_linear, make_quantized) if bits == 8 else (partial(make_packed, make=native.linear), make_packed)
    )
    ours = load_weights(spec, folder, dtype="float32", make=make)
    twin = load_weights(spec, folder, dtype="float32", make=by_torch)
    bench = Bench(level, spec, ours)
    logits, ends = by_bench(bench, CUTS), list(itertools.accumulate(CUTS))
    exact, theirs = (
        torch.stack([reference_logits(Decoder(spec, weights), bench.ids(0, end)) for end in ends]).view(len(ends), -1)
        for weights in (dense, twin)
    )
    assert 0 < divergence(exact, logits) < 1.2 * divergence(exact, theirs) + 1e-5
    assert divergence(exact, theirs) < (0.02 if bits == 8 else 0.3)


def test_the_start_finds_a_level_for_integers() -> None:
    found = start(1, torch.bfloat16, native_library(), int8=True)
    assert isinstance(found, Native)
    assert int8_test(found, torch.bfloat16) == ""


def test_wrong_products_are_seen_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    native = native_of(Level.AVX2, torch.float32)
    monkeypatch.setattr("engine.execution.cpu.native.start.make_quantized", lambda weight: make_quantized(weight + 0.1))
    assert "differ from those of torch" in int8_test(native, torch.float32)
