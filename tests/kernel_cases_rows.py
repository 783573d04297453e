"""Norms and activation against their twins. Run by test_kernels.py in a process of its own."""

import pytest
import torch
from kernel_pool import DEVICE, DTYPES, NAN, assert_same, random
from torch import Tensor

from engine.execution.reference import activation as activation_twin
from engine.execution.reference import norm as norm_twin
from engine.triton_kernels.layer_norm import layer_norm
from engine.triton_kernels.rms_norm import rms_norm
from engine.triton_kernels.silu_and_mul import silu_and_mul

WIDTHS = [(1, 64), (3, 576), (5, 1000), (2, 5120)]


def inputs(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Generator, Tensor, Tensor]:
    """A generator, x and an output of NaN; both are views with longer rows."""
    generator = torch.Generator().manual_seed(width)
    x = (random(generator, rows, width + 24) * 2 + 1).to(dtype)[:, :width]
    return generator, x, torch.full((rows, width + 8), NAN, dtype=dtype, device=DEVICE)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [None, False, True], ids=["rms", "layer", "layer-bias"])
@pytest.mark.parametrize(("rows", "width"), WIDTHS)
def test_norms(rows: int, width: int, bias: bool | None, residual: bool, dtype: torch.dtype) -> None:
    generator, x, out = inputs(rows, width, dtype)
    weight, offset = (random(generator, width, dtype=dtype) for _ in range(2))
    rest = random(generator, rows, width, dtype=dtype) if residual else None
    # The sum is rounded to the type, in the kernel and so in what is expected.
    total = x if rest is None else (x.float() + rest.float()).to(dtype)
    expected = torch.empty(rows, width, dtype=torch.float64, device=DEVICE)
    if bias is None:
        norm_twin.rms_norm(total.double(), weight.double(), expected, eps=1e-2)
        rms_norm(x, weight, out, eps=1e-2, residual=rest)
    else:
        shift = offset if bias else None
        norm_twin.layer_norm(total.double(), weight.double(), offset.double() if bias else None, expected, eps=1e-2)
        layer_norm(x, weight, shift, out, eps=1e-2, residual=rest)
    assert_same(out, expected, dtype)
    if rest is not None:
        assert torch.equal(rest, total)


@pytest.mark.parametrize("bias", [None, True], ids=["rms", "layer"])
def test_twins_add_the_residual_as_the_kernels_do(bias: bool | None) -> None:
    generator, x, out = inputs(4, 128, torch.float16)
    weight, rest = random(generator, 128, dtype=torch.float16), random(generator, 4, 128, dtype=torch.float16)
    twin_rest, twin_out = rest.clone(), torch.full_like(out, NAN)
    if bias is None:
        rms_norm(x, weight, out, eps=1e-5, residual=rest)
        norm_twin.rms_norm(x, weight, twin_out, eps=1e-5, residual=twin_rest)
    else:
        layer_norm(x, weight, weight, out, eps=1e-5, residual=rest)
        norm_twin.layer_norm(x, weight, weight, twin_out, eps=1e-5, residual=twin_rest)
    assert torch.equal(rest, twin_rest)
    assert_same(out, twin_out, torch.float16)


def test_norm_in_place() -> None:
    generator, x, out = inputs(4, 96, torch.float32)
    weight = random(generator, 96)
    rms_norm(x, weight, out, eps=1e-5)
    rms_norm(x, weight, x, eps=1e-5)
    assert torch.equal(x, out)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter; wanted below
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1536), (2, 1000)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    _, x, _ = inputs(rows, 2 * width, dtype)
    x[0, 0] = -200.0  # exp overflows
    out = torch.full((rows, width), NAN, dtype=dtype, device=DEVICE)
    expected = torch.empty(rows, width, dtype=torch.float64, device=DEVICE)
    silu_and_mul(x, out)
    activation_twin.silu_and_mul(x.double(), expected)
    assert_same(out, expected, dtype)


def test_wrong_shapes_are_refused() -> None:
    x = torch.zeros((2, 64), device=DEVICE)
    with pytest.raises(AssertionError, match="out"):
        rms_norm(x, x[0], x[:, :32], eps=1e-5)
    with pytest.raises(AssertionError, match="weight"):
        layer_norm(x, x[0, :32], None, x, eps=1e-5)
    with pytest.raises(AssertionError, match="out"):
        silu_and_mul(x, x)
