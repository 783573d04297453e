"""Linear layers on floats of 8 bits: the arithmetic, what a device is asked for, and where it runs."""

from pathlib import Path

import pytest
import torch
from dry_device import META, dry_device
from kernel_ledger import _Tensors
from test_dry_device import counts_of
from torch import Tensor

from engine.build import plan_launch, profile_key
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cuda.backend import CudaBackend
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.kernels import triton_kernels
from engine.execution.runner import Runner
from engine.models.float8 import FLOAT8, Float8Linear, make_float8, round_rows
from engine.models.linear import PlainLinear, make_linear
from engine.models.spec import spec_from_config
from engine.models.weights import DummyTensors, build_weights
from loadgen.bench.gpu.setup import SHAPES
from loadgen.bench.quantization import logits_of
from predictor.limits import Limits
from tests import tiny_models


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _nearest(weight: Tensor) -> Tensor:
    """The numbers that an e4m3 with a scale for each row can stand for, by a table of all of them, in float64."""
    table = torch.arange(256, dtype=torch.uint8).view(FLOAT8).double()
    table = table[table.isfinite()].unique()
    scale = (weight.float().abs().amax(1, keepdim=True) * (1 / 448)).double()
    distance = (weight.double()[:, :, None] / scale[:, :, None] - table).abs()
    return table[distance.argmin(-1)] * scale


def test_rounded_weights_are_the_nearest_that_there_are() -> None:
    weight = _drawn(16, 48)
    values, scales = round_rows(weight)
    expected, exact = _nearest(weight), weight.double()
    got = values.double() * scales.double()
    assert values.dtype == FLOAT8 and scales.shape == (16, 1) and scales.dtype == torch.float32
    assert ((got - exact).abs() <= (expected - exact).abs() * (1 + 1e-6) + 1e-12).all()
    assert (got - exact).abs().max() > 1e-3  # they are rounded at all


def test_largest_values_are_kept_and_zeros_are_zero() -> None:
    values, scales = round_rows(torch.tensor([[3e38, 1.0], [0.0, 0.0], [-7.3, 7.3], [1e-20, 0.0]]))
    assert values.float().isfinite().all() and scales.isfinite().all()
    assert values[0, 0] == 448 and values[2].tolist() == [-448, 448]
    assert values[1].float().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_own_row(bad: float) -> None:
    layer, x = make_float8(_drawn(32, 64)), _drawn(3, 64, seed=1)
    alone = layer(x)
    x[1, 5] = bad
    got = layer(x)
    assert got[1].isnan().all() and torch.equal(got[::2], alone[::2])
    with pytest.raises(ValueError, match="not finite"):
        make_float8(torch.full((16, 16), bad).to(torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_multiplies_rounded_numbers(rows: int, with_bias: bool) -> None:
    weight, x, bias = _drawn(48, 64), _drawn(rows, 64, seed=1), _drawn(48, seed=2) if with_bias else None
    layer = Float8Linear.of(weight, bias)
    a, b = (values.double() * scales.double() for values, scales in (round_rows(x), round_rows(weight)))
    exact = a @ b.T
    got = layer(x)
    assert got.dtype == torch.bfloat16 and got.shape == (rows, 48)
    allowed = 2**-8 * exact.abs() + 1e-4
    if bias is not None:
        exact = exact + bias.double()
        allowed = allowed + 2**-8 * exact.abs()
    assert ((got.double() - exact).abs() <= allowed).all()
    plain = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert 0.003 < (got.float() - plain).norm() / plain.norm() < 0.06  # of inputs and weights in 3 bits of mantissa


def test_parts_of_a_layer_are_the_layer() -> None:
    layer, x = make_float8(_drawn(48, 64), _drawn(48)), _drawn(4, 64, seed=1)
    assert torch.equal(layer.outputs_from(16)(x), layer(x)[:, 16:])
    assert torch.equal(layer.on(layer.data().clone())(x), layer(x))
    assert layer.data().nbytes == 48 * 64
    dense, bias = layer.dense_from(16)
    assert dense.shape == (32, 64) and bias is not None and dense.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(48, 40), (40, 48)])
def test_a_weight_of_other_sides_stays_as_it_is(shape: tuple[int, int]) -> None:
    assert isinstance(make_float8(_drawn(*shape)), PlainLinear)


@pytest.mark.parametrize("rows", [1, 3, 16, 257])
def test_a_device_is_asked_for_one_product_and_never_waited_for(rows: int) -> None:
    """`meta` checks types, strides and sizes of the product as the device does."""
    values = torch.empty(48, 64, dtype=FLOAT8, device=META)
    layer = Float8Linear(values, torch.empty(48, 1, device=META), torch.empty(48, dtype=torch.bfloat16, device=META))
    with dry_device() as dry, torch.inference_mode():
        dry.strict = True
        got = layer(torch.empty(rows, 64, dtype=torch.bfloat16, device=META))
        assert got.shape == (rows, 48) and got.dtype == torch.bfloat16 and got.device == META
        assert dry.counts["blocking"] == 0 and 0 < dry.counts["operators"] <= 12


def test_a_model_of_such_layers_is_near_the_model() -> None:
    spec, device = spec_from_config(tiny_models.llama_config()), torch.device("cpu")
    plain, rounded = (
        build_weights(spec, DummyTensors(0, torch.bfloat16, device), make) for make in (make_linear, make_float8)
    )
    assert isinstance(rounded.layers[0].qkv, Float8Linear)
    ids = list(range(3, 27))
    p, q = (logits_of(spec, each, ids).double().log_softmax(-1) for each in (plain, rounded))
    divergence = (p.exp() * (p - q)).sum(-1).mean()
    assert 0 < divergence < 0.05


@pytest.mark.parametrize("kind", ["greedy", "all of them"])
def test_steps_of_such_layers_wait_for_nothing_and_compile_nothing(kind: str) -> None:
    triton_rows = pytest.importorskip("engine.triton_kernels.round_rows").round_rows

    def make(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Float8Linear:
        n, k = weight.shape
        values = torch.empty(n, k, dtype=FLOAT8, device=META)
        return Float8Linear(values, torch.empty(n, 1, device=META), bias, triton_rows)

    spec = spec_from_config(SHAPES["8B"] | {"num_hidden_layers": 2, "vocab_size": 4096, "eos_token_id": None})
    limits = Limits(4, 32, 128, num_units=120, block_size=16)
    with dry_device() as dry:
        with torch.inference_mode():
            weights = build_weights(spec, _Tensors(), make)
        runner = Runner(CudaDevice(spec, weights, triton_kernels(), limits, graphs=True, host_units=8))
        dry.sealed = True
        assert all(not each["blocking"] for each in counts_of(dry, runner, kind))
        assert any("round_rows" in each for each in dry.compiled)


# ---- where it runs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    def has(capability: tuple[int, int]) -> None:
        monkeypatch.setattr("engine.build.find_backend", lambda _name: CudaBackend())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 * 2**30, 80 * 2**30))

    return has


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_models.write_config(tmp_path, tiny_models.llama_config(torch_dtype="float16"))
    return str(tmp_path)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_it_runs_from_8_9_on_in_bfloat16(gpu, folder: str, capability: tuple[int, int]) -> None:
    gpu(capability)
    plain = plan_launch(EngineConfig(model=folder, load_format="dummy"))
    config = EngineConfig(model=folder, load_format="dummy", quantization="fp8")
    plan = plan_launch(config)
    assert plan.precision == "bfloat16, fp8 layers" and plan.weight_bytes < plain.weight_bytes
    assert profile_key(plan) != profile_key(plain)
    make = CudaBackend().prepare(config, plan, print)[1]
    assert getattr(make, "func", make) is make_float8  # on a GPU with our kernel
    with pytest.raises(ConfigError, match="computes in bfloat16, not in float16"):
        plan_launch(EngineConfig(model=folder, load_format="dummy", quantization="fp8", dtype="float16"))


def test_elsewhere_weights_stay_and_a_line_says_so(gpu, folder: str) -> None:
    here = plan_launch(EngineConfig(model=folder, load_format="dummy", device="cpu", quantization="fp8"))
    assert here.quantization == "none"
    assert any("a CPU multiplies no floats of 8 bits" in note and here.dtype in note for note in here.notes)
    gpu((8, 0))
    plan = plan_launch(EngineConfig(model=folder, load_format="dummy", quantization="fp8"))
    assert plan.quantization == "none"
    line = "--quantization fp8: compute capability 8.0 is older than 8.9; weights stay in float16"
    assert line in plan.notes
    with pytest.raises(ConfigError, match="does not go with --offload-weights"):
        EngineConfig(quantization="fp8", offload_weights="1")
