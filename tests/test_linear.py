"""Linear layers in torch: equal to the product in float64 for every type and size."""

import pytest
import torch
from torch.nn import functional

from engine.models.linear import make_linear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (7, 33), (192, 64), (1, 1)])
def test_same_as_f_linear(dtype: torch.dtype, with_bias: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    layer = make_linear(weight, bias)
    assert (layer.out_features, layer.in_features) == shape
    for rows in (1, 2, 16, 33, 128):
        x = torch.randn(rows, shape[1]).to(dtype)
        got = layer(x)
        assert got.dtype == dtype
        assert got.shape == (rows, shape[0])
        exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
        tolerance = (32 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_of_the_last_outputs(dtype: torch.dtype, with_bias: bool) -> None:
    torch.manual_seed(4)
    weight, bias = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype) if with_bias else None
    layer = make_linear(weight, bias)
    part = layer.outputs_from(40)
    assert (part.out_features, part.in_features) == (56, 64)
    x = torch.randn(9, 64).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(part(x), layer(x)[:, 40:], rtol=tolerance, atol=tolerance)


def test_strided_and_empty_inputs() -> None:
    torch.manual_seed(2)
    weight = torch.randn(24, 32).bfloat16()
    layer = make_linear(weight)
    wide = torch.randn(10, 64).bfloat16()
    torch.testing.assert_close(layer(wide[:, 32:]), functional.linear(wide[:, 32:], weight))
    torch.testing.assert_close(layer(wide[::2, :32]), functional.linear(wide[::2, :32], weight))
    assert layer(torch.empty(0, 32, dtype=torch.bfloat16)).shape == (0, 24)


def test_a_strided_weight() -> None:
    weight = torch.randn(32, 24).bfloat16().T
    x = torch.randn(3, 32).bfloat16()
    torch.testing.assert_close(make_linear(weight)(x), functional.linear(x, weight))
