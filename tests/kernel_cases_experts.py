"""Mixtures of experts: routing, products, gates and sums. Run by test_kernels.py in a process of its own."""

import itertools
from pathlib import Path

import pytest
import tiny_transformers
import torch
from cuda_engine import make_driver
from driver import make_request
from kernel_pool import DEVICE, NAN, assert_same, random, typed

from engine.models.checkpoint import load_weights
from engine.models.experts import Routing
from engine.models.spec import ExpertSizes, load_spec
from engine.triton_kernels import configs, triton_kernels, twins
from engine.triton_kernels.experts import clamped_swiglu, grouped_product, route_experts, sum_experts


@pytest.fixture(autouse=True)
def products_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on devices whose grouped product is torch's."""
    monkeypatch.setattr(configs, "groups_by_torch", lambda _device: False)


def sizes_of(total: int, per_token: int, *, normalised: bool = True, rounded: bool = False) -> ExpertSizes:
    return ExpertSizes(total, per_token, 8, normalised, rounded)


def routed(generator: torch.Generator, tokens: int, total: int, per_token: int) -> Routing:
    """By the twin, for random logits that leave the last expert without rows."""
    logits = random(generator, tokens, total)
    logits[:, -1] = -torch.inf
    return twins.route_experts(logits, sizes_of(total, per_token))


@pytest.mark.parametrize(
    ("case", "dtype"),
    typed([(1, 128, 8, True, False), (40, 5, 4, True, True), (300, 6, 4, False, False), (9, 3, 1, False, False)], 1),
    ids=str,
)
def test_route_experts(case: tuple[int, int, int, bool, bool], dtype: torch.dtype) -> None:
    """Equal logits, zeros of both signs, and more rows than a program takes at once."""
    tokens, total, per_token, normalised, rounded = case
    logits = (random(torch.Generator().manual_seed(tokens), tokens, total + 3)[:, :total] * 2).round().div(2).to(dtype)
    sizes = sizes_of(total, per_token, normalised=normalised, rounded=rounded)
    found, expected = route_experts(logits, sizes), twins.route_experts(logits, sizes)
    assert found.shares.dtype == (dtype if rounded else torch.float32) and (logits == 0).any()
    assert_same(found.shares, expected.shares, found.shares.dtype)
    for mine, right in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(mine, right) and mine.dtype == right.dtype == torch.int32


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, in the interpreter; wanted
def test_rows_of_nan_have_experts_that_exist() -> None:
    logits = torch.full((3, 6), NAN, device=DEVICE)
    logits[1, 2:] = torch.tensor([-torch.inf, torch.inf, 0.0, -torch.inf])
    logits[2] = -torch.inf
    found = route_experts(logits, sizes_of(6, 4))
    assert found.ends[-1] == 12 and sorted(found.places.flatten().tolist()) == list(range(12))
    assert found.shares.isnan().all() and sorted(found.tokens.tolist()) == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("case", "dtype"),
    typed([(5, 8, 2, 40, 72), (40, 3, 2, 96, 130), (70, 2, 1, 64, 128), (1, 128, 8, 72, 64)], 1),
    ids=str,
)
def test_grouped_product(case: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Groups without rows, of a part of a tile, and of several tiles; sizes that no tile divides; rows by token, and as
    they are."""
    tokens, total, per_token, inputs, outputs = case
    generator = torch.Generator().manual_seed(inputs)
    rows = routed(generator, tokens, total, per_token)
    x = random(generator, tokens, inputs + 8, dtype=dtype)[:, :inputs]
    weight = random(generator, total, outputs, inputs, dtype=dtype)
    sorted_x = x[rows.tokens.long()].contiguous()
    begins = [0, *rows.ends.tolist()]
    groups = [sorted_x[begin:end].double() for begin, end in itertools.pairwise(begins)]
    expected = torch.cat([group @ each.double().mT for group, each in zip(groups, weight, strict=True)]) / inputs**0.5
    for found in (grouped_product(x, weight, rows.ends, rows.tokens), grouped_product(sorted_x, weight, rows.ends)):
        assert found.dtype == dtype
        assert_same(found / inputs**0.5, expected, dtype)


@pytest.mark.parametrize(("width", "dtype"), typed([7, 1500]), ids=str)
def test_clamped_swiglu(width: int, dtype: torch.dtype) -> None:
    """A NaN in either half stays, and limits hold."""
    generator = torch.Generator().manual_seed(width)
    rows = routed(generator, 6, 4, 2)
    x, bias = random(generator, 12, 2 * width, dtype=dtype) * 8, random(generator, 4, 2 * width, dtype=dtype)
    x[1, 0] = x[2, width] = NAN
    found = clamped_swiglu(x, bias, rows.numbers, (1.702, 7.0))
    assert_same(found, twins.clamped_swiglu(x, bias, rows.numbers, (1.702, 7.0)), dtype)
    assert found.isnan().sum() == 2 and found[found.isfinite()].max() > 30


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("width", "dtype"), typed([24, 1100]), ids=str)
def test_sum_experts(width: int, dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = routed(generator, 7, 5, 3)
    if biased:
        rows = rows._replace(shares=rows.shares.to(dtype))
    x, bias = random(generator, 21, width, dtype=dtype), random(generator, 5, width, dtype=dtype)
    given = bias if biased else None
    assert_same(sum_experts(x, given, rows), twins.sum_experts(x, given, rows), dtype)


def test_no_tokens_are_no_work() -> None:
    rows = route_experts(torch.zeros((0, 4), device=DEVICE), sizes_of(4, 2))
    assert not rows.ends.any() and not len(rows.tokens)
    x, weight = torch.zeros((0, 8), device=DEVICE), torch.zeros((4, 6, 8), device=DEVICE)
    assert grouped_product(x, weight, rows.ends, rows.tokens).shape == (0, 6)
    assert clamped_swiglu(x, weight[0, :, :8], rows.numbers, (1.0, 7.0)).shape == (0, 4)
    assert sum_experts(x, None, rows).shape == (0, 8)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_tokens_of_a_model(name: str, tmp_path: Path) -> None:
    """As the twins give them."""
    tiny_transformers.save(name, tmp_path, num_hidden_layers=2)
    spec, outputs = load_spec(tmp_path), []
    for kernels, device in ((triton_kernels(), DEVICE), (twins, torch.device("cpu"))):
        weights = load_weights(spec, tmp_path, device=device)
        driver = make_driver(spec, weights, kernels=kernels, num_blocks=40, seqs=3, tokens=16)
        driver.add(make_request("a", [5, 9, 14, 20, 33], 4), make_request("b", [7, 60], 4))
        driver.run()
        outputs.append(driver.outputs)
    assert outputs[0] == outputs[1] and len(outputs[0]["a"]) == 4
