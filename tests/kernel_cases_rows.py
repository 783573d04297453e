"""Norms and activation against their twins. Run by test_kernels.py in a process of its own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kernel_pool import DEVICE, DTYPES, NAN, assert_same, index, random
from torch import Tensor
from torch.nn import functional

from engine.execution.rows import uniforms
from engine.models import compact, torch_ops
from engine.triton_kernels import twins as twin
from engine.triton_kernels.draw import count_tokens, draw, penalise, token_mask
from engine.triton_kernels.norms import (
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_rounded,
    gelu_tanh_and_mul,
    round_rows,
    scale_rows,
    silu_and_mul,
    silu_and_mul_rounded,
    unpack_tiles,
)
from engine.triton_kernels.step_tokens import accept_tokens, begin_step, embed_tokens, softcap
from engine.triton_kernels.work import DecodeWork

WIDTHS = [(1, 64), (3, 576), (5, 1000), (2, 5120)]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill allocations of the wrappers with NaN until the kernel has written them."""

    new_empty = Tensor.new_empty

    def new_nan(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", new_nan)
    yield


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return add_rms_norm(x, None, weight, 1e-2)[0]


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Generator, Tensor]:
    """A generator, and x as a view with longer rows."""
    generator = torch.Generator().manual_seed(width)
    return generator, (random(generator, rows, width + 24) * 2 + 1).to(dtype)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), WIDTHS)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    generator, x = inputs(rows, width, dtype)
    weight, residual = random(generator, width, dtype=dtype), random(generator, rows, width + 8, dtype=dtype)[:, :width]
    assert_same(rms_norm(x, weight), torch_ops.rms_norm(x.float(), weight.float(), 1e-2), dtype)
    out, total = add_rms_norm(x, residual, weight, 1e-2)
    twin_out, twin_total = twin.add_rms_norm(x, residual, weight, 1e-2)
    assert torch.equal(total, twin_total)
    # The sum is rounded before it is normed, so the norm in float32 starts from the rounded sum.
    assert_same(out, torch_ops.rms_norm(total.float(), weight.float(), 1e-2), dtype)
    assert_same(out, twin_out, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_with_a_weight_of_floats_is_rounded_once(dtype: torch.dtype) -> None:
    generator, x = inputs(5, 1000, dtype)
    weight = random(generator, 1000) + 1.0
    wide = x.double()
    expected = (wide * (wide.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * weight).to(dtype)
    for found in (rms_norm(x, weight), twin.add_rms_norm(x, None, weight, 1e-2)[0]):
        assert found.dtype == dtype
        assert float((found != expected).float().mean()) < (0.01 if dtype.itemsize == 2 else 1.0), "rounded twice"
        assert_same(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), WIDTHS)
def test_layer_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    generator, x = inputs(rows, width, dtype)
    weight, bias = (random(generator, width, dtype=dtype) for _ in range(2))
    residual = random(generator, rows, width + 8, dtype=dtype)[:, :width]
    wide = weight.double(), bias.double()
    expected = functional.layer_norm(x.double(), (width,), *wide, 1e-2)
    assert_same(add_layer_norm(x, None, weight, bias, 1e-2)[0], expected, dtype)
    out, total = add_layer_norm(x, residual, weight, bias, 1e-2)
    twin_out, twin_total = twin.add_layer_norm(x, residual, weight, bias, 1e-2)
    assert torch.equal(total, twin_total)
    assert_same(out, functional.layer_norm(total.double(), (width,), *wide, 1e-2), dtype)
    assert_same(out, twin_out, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chosen", [[4, 0, 4, 3], [2], []], ids=len)
def test_sums_of_chosen_rows(chosen: list[int], dtype: torch.dtype) -> None:
    """Equal to the norms of all rows to the last bit; some rows come twice, most not at all."""
    generator, x = inputs(5, 1000, dtype)
    weight, bias = (random(generator, 1000, dtype=dtype) for _ in range(2))
    residual, rows = random(generator, 5, 1008, dtype=dtype)[:, :1000], index(chosen)
    scale = torch.full((1,), 0.004, device=DEVICE)
    calls: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (add_rms_norm, twin.add_rms_norm, (weight, 1e-2)),
        (add_layer_norm, twin.add_layer_norm, (weight, bias, 1e-2)),
        (add_rms_norm_rounded, twin.add_rms_norm_rounded, (weight, 1e-2, None)),
        (add_rms_norm_rounded, twin.add_rms_norm_rounded, (weight, 1e-2, scale)),
    ]
    for kernel, torchs, arguments in calls:
        found, total = kernel(x, residual, *arguments, rows)
        every, totals = kernel(x, residual, *arguments)
        expected, twin_total = torchs(x, residual, *arguments, rows)
        assert torch.equal(total, totals[chosen]) and torch.equal(total, twin_total)
        if isinstance(found, Tensor):
            assert torch.equal(found, every[chosen])
            assert_same(found, expected, dtype)
        else:
            (values, scales), (all_values, all_scales) = found, every
            assert torch.equal(values.float(), all_values.float()[chosen]) and torch.equal(scales, all_scales[chosen])
            assert values.shape == expected[0].shape and scales.shape == expected[1].shape


@pytest.mark.parametrize("wide", [False, True], ids=["weights as x", "weights of floats"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), WIDTHS)
def test_norms_of_what_is_added(rows: int, width: int, dtype: torch.dtype, wide: bool) -> None:
    """Equal to a norm that runs before, to the last bit."""
    generator, x = inputs(rows, width, dtype)
    weight, inner = (random(generator, width, dtype=torch.float32 if wide else dtype) for _ in range(2))
    residual, chosen = random(generator, rows, width + 8, dtype=dtype)[:, :width], index([0, rows - 1])
    normed = rms_norm(x, inner)
    for which in (None, chosen):
        found = add_rms_norm(x, residual, weight, 1e-2, which, inner)
        assert all(map(torch.equal, found, add_rms_norm(normed, residual, weight, 1e-2, which)))
        expected = twin.add_rms_norm(x, residual, weight, 1e-2, which, inner)
        for actual, other in zip(found, expected, strict=True):
            assert actual.shape == other.shape
            torch.testing.assert_close(actual.float(), other.float(), rtol=0.04, atol=0.04)
        rounded, total = add_rms_norm_rounded(x, residual, weight, 1e-2, None, which, inner)
        plain, same = add_rms_norm_rounded(normed, residual, weight, 1e-2, None, which)
        assert torch.equal(total, same) and torch.equal(rounded[1], plain[1])
        assert torch.equal(rounded[0].float(), plain[0].float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), WIDTHS)
def test_layer_norm_of_two_branches(rows: int, width: int, dtype: torch.dtype) -> None:
    """To the last bit what adding them first gives."""
    generator, x = inputs(rows, width, dtype)
    weight, bias = (random(generator, width, dtype=dtype) for _ in range(2))
    residual, beside = (random(generator, rows, width + more, dtype=dtype)[:, :width] for more in (8, 16))
    for which in (None, index([rows - 1])):
        found = add_layer_norm(x, residual, weight, bias, 1e-2, which, beside)
        assert all(map(torch.equal, found, add_layer_norm(x + beside, residual, weight, bias, 1e-2, which)))
        out, total = twin.add_layer_norm(x, residual, weight, bias, 1e-2, which, beside)
        assert torch.equal(found[1], total)
        assert_same(found[0], out, dtype)


def test_layer_norm_of_rows_far_from_zero() -> None:
    """The variance is taken around the mean: no cancellation."""
    _, x = inputs(3, 500, torch.float32)
    x += 1000.0
    ones = torch.ones(500, device=DEVICE)
    expected = functional.layer_norm(x.double(), (500,), eps=1e-5)
    found, _ = add_layer_norm(x, None, ones, torch.zeros_like(ones), 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # of an infinity, from itself
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 4112), (0, 64)])
def test_round_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """To the last bit on a CPU; a GPU's twin may divide otherwise. A row that is not finite has no scale."""
    x = torch.cat((inputs(rows + 1, width, dtype)[1], torch.zeros((1, width), dtype=dtype, device=DEVICE)))
    x = x * torch.logspace(-4, 0, width, device=DEVICE).to(dtype) if rows else x[:0]
    values, scales = round_rows(x)
    expected, wanted = compact.round_rows(x)
    assert torch.equal(scales, wanted) and values.dtype == torch.float8_e4m3fn
    differ = values.view(torch.uint8) != expected.view(torch.uint8)
    assert (differ & (values.float() != expected.float())).sum() <= (0 if DEVICE.type == "cpu" else x.numel() // 1000)
    for bad in (NAN, -torch.inf) if rows else ():
        x[0, -1] = bad
        assert round_rows(x)[1].isnan().flatten().tolist() == [True] + [False] * (rows + 1)


@pytest.mark.parametrize(("outputs", "inputs", "inner", "group"), [(24, 384, 8, 128), (8, 32, 2, 32), (40, 64, 4, 64)])
def test_unpack_tiles(outputs: int, inputs: int, inner: int, group: int) -> None:
    """Any order of values in a tile gives the same bits on a GPU; the interpreter cuts bfloat16 off."""
    generator, depth = torch.Generator().manual_seed(inner), 16 * inner
    shape = (outputs // 8, inputs // depth, 32, inner // 2)
    tiles = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator).to(DEVICE)
    places = torch.randperm(8 * depth, generator=generator).to(DEVICE)
    scales = torch.rand((inputs // group, outputs), generator=generator).bfloat16() + 0.01
    zeros = torch.randint(0, 16, scales.shape, generator=generator)
    scales[0, 0] = 0.0
    both = torch.stack((scales, ((8 - zeros) * scales.float()).bfloat16()), -1).to(DEVICE)
    expected = compact.TiledWeight(tiles, places, both).unpacked()
    found = unpack_tiles(tiles, places, both)
    torch.testing.assert_close(found, expected, rtol=2**-7 if DEVICE.type == "cpu" else 0.0, atol=0.0)
    assert not found[0, :group].any(), "a scale of zero makes zeros"


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # of an infinity, from itself
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 4112), (0, 64)])
def test_scale_rows(rows: int, width: int, dtype: torch.dtype) -> None:
    """Some values are beyond the largest float, many among the smallest; rows that are not finite have no scale."""
    x = inputs(rows + 2 if rows else 0, width, dtype)[1] * torch.logspace(-5, 1, width, device=DEVICE).to(dtype)
    if rows:
        x[-1, 0], x[-2, -1] = NAN, -torch.inf
    scale = torch.full((1,), 0.0123, device=DEVICE)
    values, scales = scale_rows(x, scale)
    expected, wanted = compact.scale_rows(x, scale)
    assert torch.equal(scales.isnan(), wanted.isnan()) and scales.isnan().sum() == 2 * bool(rows)
    assert (scales[:rows] == scale).all() and values.dtype == torch.float8_e4m3fn
    differ = values[:rows].float() != expected[:rows].float()
    assert differ.sum() <= (0 if DEVICE.type == "cpu" else x.numel() // 1000)
    assert not rows or (values[:rows].float().abs() == 448).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of an infinity
@pytest.mark.parametrize("given", [None, 0.004], ids=["by row", "by scale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 4112), (0, 64)])
def test_rounding_behind_norms_and_gates(rows: int, width: int, dtype: torch.dtype, given: float | None) -> None:
    """Equal to the kernels one after the other, to the last bit; each has its twin."""
    generator, x = inputs(rows, width, dtype)
    scale = None if given is None else torch.full((1,), given, device=DEVICE)

    def check(found: tuple[Tensor, Tensor], plain: Tensor, twins: tuple[Tensor, Tensor]) -> None:
        values, scales = round_rows(plain) if scale is None else scale_rows(plain, scale)
        assert torch.equal(found[1].isnan(), scales.isnan())
        fine = ~scales.isnan().flatten()
        assert torch.equal(found[1][fine], scales[fine])
        assert torch.equal(found[0][fine].float(), values[fine].float())
        whole, other = (each[0][fine].float() * each[1][fine] for each in (found, twins))
        torch.testing.assert_close(whole, other, rtol=0.13, atol=0.02 * float(scales[fine].sum()))

    weight, residual = random(generator, width, dtype=dtype), random(generator, rows, width + 8, dtype=dtype)[:, :width]
    for bad in (0.0, torch.inf) if rows else (0.0,):
        x[:1, 0] += bad
        for added in (None, residual):
            found, total = add_rms_norm_rounded(x, added, weight, 1e-2, scale)
            plain, expected = add_rms_norm(x, added, weight, 1e-2)
            assert torch.equal(total, expected)
            check(found, plain, twin.add_rms_norm_rounded(x, added, weight, 1e-2, scale)[0])
        wide = torch.cat((x, residual), 1)
        check(silu_and_mul_rounded(wide, scale), silu_and_mul(wide), twin.silu_and_mul_rounded(wide, scale))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter; wanted below
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1536), (2, 1000)])
def test_gates(rows: int, width: int, dtype: torch.dtype) -> None:
    _, x = inputs(rows, 2 * width, dtype)
    x[0, 0] = -200.0  # exp overflows
    assert_same(silu_and_mul(x), twin.silu_and_mul(x.double()), dtype)
    x[0, 1] = -40.0  # a cube beyond half precision
    assert_same(gelu_tanh_and_mul(x), twin.gelu_tanh_and_mul(x.double()), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 2085])
def test_softcap(width: int, dtype: torch.dtype) -> None:
    """From the smallest to those beyond the cap, each to its last digits; in rows of another stride."""
    generator = torch.Generator().manual_seed(width)
    x = (random(generator, 3, width + 5) * torch.logspace(-5, 3, width + 5, device=DEVICE)).to(dtype)[:, :width]
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, NAN])
    out = torch.full((3, width + 2), NAN, dtype=dtype, device=DEVICE)[:, 1 : width + 1]
    assert softcap(x, 30.0, out) is out
    expected, rounding = twin.softcap(x.double(), 30.0), torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected.double(), rtol=rounding + 2e-6, atol=1e-7, equal_nan=True)
    assert torch.equal(softcap(x, 30.0)[1:], out[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 5.5])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 1000), (3, 2085)])
def test_embed_tokens(tokens: int, width: int, learned: bool, scale: float | None, dtype: torch.dtype) -> None:
    """Tokens that the host knows, and such as the device alone does."""
    generator = torch.Generator().manual_seed(width)
    embedding, places = random(generator, 17, width, dtype=dtype), random(generator, 9, width, dtype=dtype)
    last = torch.tensor([3, 16, 0, 7], dtype=torch.int32, device=DEVICE)
    ids, source, positions = (
        torch.tensor(each[:tokens], dtype=torch.int32, device=DEVICE)
        for each in ([-1, 16, -1, 0, -1], [1, 0, 3, 2, 0], [6, 0, 1, 3, 5])
    )
    common = ids, source, last, positions, embedding, scale, places if learned else None, 2
    assert torch.equal(embed_tokens(*common), twin.embed_tokens(*common))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("count", "padded", "capacity", "longest"), [(1, 1, 9, 5001), (5, 8, 40, 2000), (0, 4, 9, 2)])
def test_begin_step(count: int, padded: int, capacity: int, longest: int, steps: int) -> None:
    """As the host fills a step that begins `steps` later: whole and split contexts, padding, many changes."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, longest, count).astype(np.int32)
    base, seeds = np.zeros((padded, 8), np.int32), rng.integers(-(2**63), 2**63 - 1, count)
    base[:count, :4] = np.stack((lengths, rng.permutation(count), lengths - 1, lengths // 2), axis=1)
    base.view(np.int64)[:count, 2] = seeds
    base[:, 6] = np.arange(padded) % 3 * 7000
    changes = np.stack((rng.permutation(90), np.arange(90) + 100), axis=1)[: 40 * count].astype(np.int32).ravel()
    control = np.concatenate(((steps, len(changes) // 2, count, count), changes, changes * 0)).astype(np.int32)
    expected = DecodeWork(padded, capacity, 64, DEVICE)
    expected.fill(base[:count, 1], lengths + steps)
    expected.buffer.upload()
    found = []
    for begin in (begin_step, twin.begin_step):
        work, tables = DecodeWork(padded, capacity, 64, DEVICE), torch.arange(90, dtype=torch.int32, device=DEVICE)
        work.buffer.upload()
        ids, positions, angles = (torch.full((padded,), 55, dtype=torch.int32, device=DEVICE) for _ in "abc")
        uniform = torch.zeros(padded, dtype=torch.float64, device=DEVICE)
        inputs = (torch.from_numpy(each).to(DEVICE) for each in (control, base))
        begin(*inputs, tables, ids, positions, angles, uniform, work)
        assert torch.equal(work.requests, expected.requests) and torch.equal(work.ranges, expected.ranges)
        used = expected.items[:, 0] >= 0
        assert torch.equal(work.items[used], expected.items[used]) and (work.items[~used, 0] == -1).all()
        assert np.array_equal(uniform[:count].cpu(), uniforms(seeds, lengths // 2 + steps))
        assert np.array_equal(angles[:count].cpu(), lengths - 1 + steps + base[:count, 6]) and not angles[count:].any()
        found.append((tables.tolist(), ids.tolist(), positions.tolist()))
    wanted = dict(enumerate(range(90))) | dict(changes.reshape(-1, 2).tolist())
    rest = [0] * (padded - count)
    tokens = [-1] * count if steps else lengths.tolist()
    assert found == [(list(wanted.values()), tokens + rest, (lengths - 1 + steps).tolist() + rest)] * 2


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("count", [1, 5, 1500])
def test_accept_tokens(count: int, known: bool, kind: torch.dtype) -> None:
    """Of tokens without a finite logit the request learns, and a step behind it reads some id nevertheless."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(-1, 99, (count,), generator=generator, dtype=kind).to(DEVICE)
    best = random(generator, count)
    for place, value in enumerate((-torch.inf, torch.nan, torch.inf)):
        best[place::7] = value
    rows = torch.randperm(count + 3, generator=generator)[:count].to(DEVICE, torch.int32)
    found, expected = ([torch.full((count + 3,), 55, dtype=torch.int32, device=DEVICE) for _ in "ab"] for _ in "ab")
    for accept, (sampled, last) in ((accept_tokens, found), (twin.accept_tokens, expected)):
        accept(tokens, None if known else best, rows, sampled[:count], last)
    assert all(map(torch.equal, found, expected))
    assert known or found[0][0] == -1, "a logit that is not finite"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 64), (5, 1000), (3, 2085)])
def test_token_mask(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Every bit of a word, the sign bit included; rows without a mask stay as they are."""
    generator, logits = inputs(rows + 2, vocab, dtype)
    bits = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator, dtype=torch.int64)
    bits[0, 0] = 1 << 31  # the last bit alone
    bits = bits.to(torch.int32).to(DEVICE)
    places = torch.arange(rows + 1, 1, -1, dtype=torch.int32, device=DEVICE)
    expected = logits.clone()
    twin.token_mask(expected, places, bits)
    token_mask(logits, places, bits)
    assert torch.equal(logits, expected)
    assert logits[:2].isfinite().all() and logits[places[0], :31].isinf().all() and logits[places[0], 31].isfinite()


@pytest.mark.parametrize(("vocab", "spread"), [(50, 0.0), (50, 3.0), (5000, 0.5)])
def test_draws_by_pivots_equal_those_by_sorting(vocab: int, spread: float) -> None:
    """Every filter and all together; many equal logits, and -inf; the ends of the unit interval; rows that are left."""
    generator = torch.Generator().manual_seed(vocab)
    filters = [(0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (vocab, 1.0, 0.0), (0, 0.5, 0.0), (0, 1e-6, 0.0)]
    filters += [(0, 0.999, 0.0), (0, 1.0, 0.3), (0, 1.0, 1.0), (30, 0.9, 0.02), (2, 0.99, 0.5)]
    ends = [0.0, 1 - 2.0**-52, 0.4]
    wishes = [(uniform, *each) for each in filters for uniform in ends]
    uniform = torch.tensor([each[0] for each in wishes], dtype=torch.float64, device=DEVICE)
    top_k, top_p, min_p = (torch.tensor(each, device=DEVICE) for each in list(zip(*wishes, strict=True))[1:])
    logits = (random(generator, len(wishes), vocab) * spread).mul(4).round().div(4)  # ties
    logits[:, ::7] = -torch.inf
    greedy = logits.argmax(dim=-1).to(torch.int32)
    temperature = torch.full((len(wishes),), 0.8, device=DEVICE)
    greedy[3], temperature[5], logits[3, 1] = -1, 0.0, NAN
    inputs = (uniform, temperature, top_k.to(torch.int32), top_p, min_p)
    drawn = draw(logits, greedy, *inputs)
    assert torch.equal(drawn, twin.draw(logits, greedy, *inputs))
    assert (drawn[3], drawn[5]) == (-1, greedy[5])
    assert logits.gather(1, drawn.clamp(min=0).long()[:, None])[greedy >= 0].isfinite().all()
    for row in range(0, len(wishes), 9):  # alone as in company
        alone = draw(logits[row : row + 1], greedy[row : row + 1], *(each[row : row + 1] for each in inputs))
        assert torch.equal(alone, drawn[row : row + 1])


@pytest.mark.parametrize("vocab", [64, 2085])
def test_penalties_and_histories(vocab: int) -> None:
    generator, logits = inputs(5, vocab, torch.float32)
    history = torch.randint(-6, 6, (7, vocab), generator=generator, dtype=torch.int32).clamp(min=0).to(DEVICE)
    places, rows = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([4, 0, 1], [2, 6, 0]))
    penalties = torch.tensor([[1.3, 0.4, -0.2], [0.5, 0.0, 0.0], [1.0, 0.7, 1.5]], device=DEVICE)
    expected, said = logits.clone(), history.clone()
    twin.penalise(expected, places, rows, history, penalties)
    penalise(logits, places, rows, history, penalties)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    tokens = torch.tensor([5, -1, 0, 0, 63], dtype=torch.int32, device=DEVICE)
    count_tokens(history, rows, places, tokens)
    assert (history - said).nonzero().tolist() == [[2, 63], [6, 5]] and (history - said).max() == 2
    twin.count_tokens(said, rows, places, tokens)
    assert torch.equal(history, said)


def test_no_rows_are_no_work() -> None:
    x, weight = torch.zeros((0, 64), device=DEVICE), torch.ones(64, device=DEVICE)
    assert rms_norm(x, weight).shape == add_layer_norm(x, None, weight, weight, 1e-5)[0].shape == (0, 64)
    assert silu_and_mul(x).shape == (0, 32)


def test_wrong_shapes_are_refused() -> None:
    x = torch.zeros((2, 64), device=DEVICE)
    with pytest.raises(AssertionError, match="residual"):
        add_rms_norm(x, x[:, :32], x[0], 1e-5)
    with pytest.raises(AssertionError, match="weight"):
        add_layer_norm(x, None, x[0, :32], x[0], 1e-5)
    with pytest.raises(AssertionError, match="2 \\* width"):
        silu_and_mul(x[:, :63])
