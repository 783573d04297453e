"""Linear layers on floats of 8 bits: the arithmetic, the products of a device, and the devices that have them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import packed_checkpoints
import pytest
import tiny_models
import torch
from compiled_kernels import Tensors
from dry_device import META, dry_device
from safetensors.torch import load_file, save_file
from test_dry_device import counts_of
from torch import Tensor

from benchmarks.gpu.setup import SHAPES
from benchmarks.quantization import logits_of
from engine.build import plan_launch, profile_key
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution.cuda.backend import CudaBackend
from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Runner
from engine.limits import Limits
from engine.models import compact
from engine.models.checkpoint import load_weights
from engine.models.compact import FLOAT8, Float8Linear, RoundedRows, Rounding, make_float8, round_rows, scale_rows
from engine.models.decoder import Decoder, product
from engine.models.linear import AnyWeight, Linear, MakeLinear, PlainLinear, make_linear
from engine.models.quantized import RoundedWeight
from engine.models.spec import load_spec, spec_from_config
from engine.models.weights import DummyTensors, LayerWeights, ModelWeights, ResidentLayers, build_weights, matrices
from engine.triton_kernels import triton_kernels, twins


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _nearest(weight: Tensor) -> Tensor:
    """The numbers that an e4m3 with a scale for each row can stand for, by a table of all such numbers, in float64."""
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


@pytest.mark.parametrize("shape", [(48, 40), (40, 48)])
def test_a_weight_of_other_sides_stays_as_it_is(shape: tuple[int, int]) -> None:
    assert isinstance(make_float8(_drawn(*shape)), PlainLinear)
    values, scales = round_rows(_drawn(*shape))
    stored = make_float8(RoundedWeight(values, scales.flatten(), torch.bfloat16))
    assert isinstance(stored, PlainLinear)
    assert torch.equal(stored.dense_from(0)[0], (values.float() * scales).to(torch.bfloat16))


def test_a_given_scale_cuts_off_what_is_beyond_it() -> None:
    x = torch.tensor([[0.26, -500.0, 3e38, 1.0], [torch.nan, 1, 0, -0.5], [torch.inf, 1, 0, -0.5]])
    values, scales = scale_rows(x, torch.tensor([0.5]))
    assert scales[0] == 0.5 and scales[1:].isnan().all() and values.dtype == FLOAT8
    assert values[0].tolist() == [0.5, -448, 448, 2] and values[:, 1:].float().isfinite().all()


@pytest.mark.parametrize("rows", [1, 3, 16, 257])
def test_a_device_is_asked_for_one_product_and_never_waited_for(rows: int) -> None:
    """`meta` checks types, strides and sizes of the product as the device does."""
    values = torch.empty(48, 64, dtype=FLOAT8, device=META)
    weight = RoundedWeight(values, torch.empty(48, 1, device=META), torch.bfloat16)
    layer = Float8Linear(weight, torch.empty(48, dtype=torch.bfloat16, device=META))
    with dry_device() as dry, torch.inference_mode():
        dry.strict = True
        got = layer(torch.empty(rows, 64, dtype=torch.bfloat16, device=META))
        assert got.shape == (rows, 48) and got.dtype == torch.bfloat16 and got.device == META
        assert dry.counts["blocking"] == 0 and 0 < dry.counts["operators"] <= 12


def _meta_layers(stored: bool) -> MakeLinear:
    kernels = pytest.importorskip("engine.triton_kernels.norms")
    rounding = Rounding(kernels.round_rows, kernels.scale_rows)

    def make(weight: AnyWeight, bias: Tensor | None = None, **_gated: bool) -> Float8Linear:
        assert isinstance(weight, Tensor)
        n, k = weight.shape
        values = torch.empty(n, k, dtype=FLOAT8, device=META)
        inputs = torch.ones(1, device=META) if stored else None
        rounded = RoundedWeight(values, torch.empty(n, 1, device=META), torch.bfloat16, inputs)
        return Float8Linear(rounded, bias, rounding)

    return make


def _dry_runner(make: MakeLinear, *, graphs: bool = True) -> Runner[CudaDevice]:
    spec = spec_from_config(SHAPES["8B"] | {"num_hidden_layers": 2, "vocab_size": 4096, "eos_token_id": None})
    limits = Limits(4, 32, 128, num_units=120, block_size=16)
    with torch.inference_mode():
        weights = build_weights(spec, Tensors(), make)
    return Runner(CudaDevice(spec, weights, triton_kernels(), limits, graphs=graphs, host_units=8))


@pytest.mark.parametrize("stored", [False, True], ids=["scales of rows", "stored scales"])
@pytest.mark.parametrize("kind", ["greedy", "all of them"])
def test_steps_of_such_layers_wait_for_nothing_and_compile_nothing(kind: str, stored: bool) -> None:
    with dry_device() as dry:
        runner = _dry_runner(_meta_layers(stored))
        dry.sealed = True
        assert all(not each["blocking"] for each in counts_of(dry, runner, kind))
        for name in (
            "scale_rows_kernel" if stored else "round_rows_kernel",
            "rms_norm_rounded",
            "silu_and_mul_rounded",
        ):
            assert any(name in each for each in dry.compiled)


def test_inputs_are_rounded_by_the_kernel_before_where_there_is_one() -> None:
    """Of a layer's four inputs, what attention gives takes a launch of its own."""
    launches = []
    for make in (make_linear, _meta_layers(False), _meta_layers(True)):
        with dry_device() as dry:
            runner = _dry_runner(make, graphs=False)
            launches.append([each["kernels"] for each in counts_of(dry, runner, "greedy")])
    plain, *rounded = launches
    assert all(each == [count + 2 for count in plain] for each in rounded)


@pytest.mark.parametrize("static", [None, 0.02])
def test_rounding_in_norms_and_gates_changes_no_bit(static: float | None) -> None:
    class Whole:  # a layer without rounded input
        def __init__(self, layer: Linear) -> None:
            self._layer = layer

        def __call__(self, x: Tensor) -> Tensor:
            return self._layer(x)

    def make(weight: AnyWeight, bias: Tensor | None = None, **_gated: bool) -> Linear:
        layer = make_float8(weight, bias)
        if isinstance(layer, Float8Linear) and static is not None:
            layer.inputs = torch.tensor([static])
        return layer

    spec, device = spec_from_config(tiny_models.llama_config(intermediate_size=96)), torch.device("cpu")
    weights = build_weights(spec, DummyTensors(0, torch.bfloat16, device), make)
    fused = Decoder(spec, weights, twins)
    layers = [replace(each, qkv=Whole(each.qkv), up=Whole(each.up), down=Whole(each.down)) for each in weights.layers]
    apart = Decoder(spec, replace(weights, layers=ResidentLayers(layers), head=Whole(weights.head)))
    seen = []

    def attend(index: int, layer: LayerWeights, x: Tensor | RoundedRows) -> Tensor:
        seen.extend([index] * isinstance(x, RoundedRows))
        return product(layer.qkv, x)[:, : spec.q_size]

    hidden = _drawn(5, spec.hidden_size)
    expected, got = apart.run(hidden, attend), fused.summed(*fused.run_unsummed(hidden, attend, rounds=True))
    assert torch.equal(got, expected) and torch.equal(fused.run(hidden, attend), expected)
    assert torch.equal(fused.logits(hidden), apart.logits(hidden)) and seen == list(range(spec.num_layers))


# ---- where it runs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    def has(capability: tuple[int, int]) -> None:
        monkeypatch.setattr("engine.execution.backend.find_backend", lambda _name: CudaBackend())
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


def test_elsewhere_weights_stay_and_a_line_says_so(gpu, folder: str) -> None:
    here = plan_launch(EngineConfig(model=folder, load_format="dummy", device="cpu", quantization="fp8"))
    assert here.quantization == "none"
    assert any("8-bit floats are not supported on a CPU" in note and here.dtype in note for note in here.notes)
    gpu((8, 0))
    plan = plan_launch(EngineConfig(model=folder, load_format="dummy", quantization="fp8"))
    assert plan.quantization == "none"
    line = "--quantization fp8: compute capability 8.0 is older than 8.9; weights stay in float16"
    assert line in plan.notes
    with pytest.raises(ConfigError, match="cannot be combined with --offload-weights"):
        EngineConfig(quantization="fp8", offload_weights="1")


# ---- floats that a checkpoint stores

F32, BF16 = torch.float32, torch.bfloat16


def _stored(folder: Path, name: str, static: float | None = None, case: str = "llama-gqa2") -> dict[str, Tensor]:
    """A tiny checkpoint by packed_checkpoints.FORMATS[name], whose inputs have these scales; see `write`."""
    weights = packed_checkpoints.write(folder, name, case)
    if static is not None:
        scales = {key.replace(".weight", ".input_scale"): torch.tensor(static) for key in weights}
        tiny_models.rewrite(folder, lambda tensors: tensors.update(scales))
    return weights


def _loaded(folder: Path, **options: bool) -> ModelWeights:
    make = partial(make_float8, keeps_floats=True)
    return load_weights(load_spec(folder), folder, dtype="bfloat16", make=make, stored=True, **options)


def _odd(weight: Tensor) -> bool:
    return any(size % 16 for size in weight.shape)  # such a layer is a plain one


def _by_transformers(
    folder: Path, weights: dict[str, Tensor], static: float | None, ids: list[int], kind: torch.dtype
) -> Tensor:
    """Logits of transformers' modules with the dequantised weights in a type, whose linear layers are given what the
    formats' definition makes of their inputs: x / scale as e4m3 between its ends, times scale."""
    packed_checkpoints.write_dense(folder, weights)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)

    def rounded(_module: object, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = given[0].float()
        scale = x.abs().amax(-1, keepdim=True) / 448 if static is None else torch.tensor(static)
        return (((x / scale).clamp(-448, 448).to(FLOAT8).float() * scale).to(kind),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers." in name and module.in_features % 16 == 0:
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize(
    ("name", "static"), [("float8 by outputs", None), ("fp8", 0.02), ("fp8", 0.0015)], ids=["rows", "wide", "cut off"]
)
def test_stored_floats_compute_as_transformers_modules_do(name: str, static: float | None, tmp_path: Path) -> None:
    """As near to float32 as transformers' own modules in bfloat16 are."""
    weights = _stored(tmp_path / "packed", name, static)
    ids = list(range(3, 40))
    exact, theirs = (_by_transformers(tmp_path / "dense", weights, static, ids, kind) for kind in (F32, BF16))
    model = _loaded(tmp_path / "packed")
    ours = logits_of(load_spec(tmp_path / "packed"), model, ids).double()
    assert isinstance(model.layers[0].up, Float8Linear) and not isinstance(model.head, Float8Linear)
    assert (ours - exact).norm() < 1.1 * (theirs - exact).norm() < 0.2 * exact.norm()
    if static == 0.0015:  # the part that is cut off is: with scales of rows the answer is another
        other = _by_transformers(tmp_path / "dense", weights, None, ids, F32)
        assert (other - exact).norm() > exact.norm()


@pytest.mark.parametrize("case", ["llama-gqa2", "neox"])
@pytest.mark.parametrize("name", ["float8 by outputs", "fp8"])
def test_stored_values_and_scales_are_the_layers(name: str, case: str, tmp_path: Path) -> None:
    """Of a layer's weight every value is the checkpoint's, dequantised to the last bit by the format's formula."""
    weights = _stored(tmp_path, name, case=case)
    spec = load_spec(tmp_path)
    model, plain = _loaded(tmp_path), load_weights(spec, tmp_path, dtype="bfloat16")
    for ours, others in zip(model.layers, plain.layers, strict=True):
        for layer, other in zip(matrices(ours), matrices(others), strict=True):
            dense = layer.dense_from(0)[0]
            assert torch.equal(dense, other.dense_from(0)[0]) and isinstance(layer, Float8Linear) != _odd(dense)
    out = next(key for key in weights if "layers.1." in key and ("o_proj" in key or "attention.dense." in key))
    values = load_file(tmp_path / "model.safetensors")[out]
    assert torch.equal(model.layers[1].out.data(), values.view(torch.uint8).flatten())


def test_layers_of_one_input_take_the_largest_of_its_scales(tmp_path: Path) -> None:
    _stored(tmp_path, "fp8", 0.02)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.self_attn.k_proj.input_scale"
    for given, expected in ((torch.tensor([0.03]), 0.03), (torch.tensor(0.01), 0.02)):
        save_file(tensors | {key: given}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        layer = _loaded(tmp_path).layers[0].qkv
        assert isinstance(layer, Float8Linear)
        x, dense = _drawn(2, layer.in_features), layer.dense_from(0)[0].double()
        rounded = (x.float() / expected).clamp(-448, 448).to(FLOAT8).double() * expected
        exact = rounded @ dense.t()
        torch.testing.assert_close(layer(x).double(), exact, rtol=2**-7, atol=0.01 * float(exact.std()))
        assert torch.equal(layer.outputs_from(16)(x), layer(x)[:, 16:])
    for wrong in (torch.tensor(0.0), torch.tensor(torch.nan), torch.ones(2)):
        save_file(tensors | {key: wrong}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match="the scale of inputs"):
            _loaded(tmp_path)


def test_a_gpu_computes_with_stored_floats(gpu, tmp_path: Path) -> None:
    gpu((9, 0))
    _stored(tmp_path / "rows", "float8 by outputs")
    _stored(tmp_path / "fp8", "fp8", 0.02)
    for name, said in (("rows", "a scale for each token"), ("fp8", "with the scales of inputs that are stored")):
        config = EngineConfig(model=str(tmp_path / name))
        plan = plan_launch(config)
        assert (plan.quantization, plan.precision, plan.stored) == ("stored fp8", "bfloat16, stored fp8 layers", True)
        assert plan.notes[-1].endswith(said)
        again = plan_launch(EngineConfig(model=str(tmp_path / name), quantization="fp8"))
        assert (again.quantization, again.stored) == ("fp8", True) and again.notes[-1].endswith("as they are stored")
        unpacked = plan_launch(EngineConfig(model=str(tmp_path / name), dtype="float16"))
        assert again.weight_bytes < plan.weight_bytes < unpacked.weight_bytes
        make = CudaBackend().prepare(config, plan, print)[1]
        weights = load_weights(plan.own, plan.folder, dtype=plan.dtype, make=make, stored=plan.stored)
        assert isinstance(weights.layers[0].up, Float8Linear) and isinstance(weights.head, PlainLinear)


def test_elsewhere_stored_floats_are_unpacked_and_a_line_says_why(gpu, tmp_path: Path) -> None:
    _stored(tmp_path / "rows", "float8 by outputs")
    _stored(tmp_path / "blocks", "fp8 in blocks")
    for quantization in ("none", "int8"):
        plan = plan_launch(EngineConfig(model=str(tmp_path / "rows"), device="cpu", quantization=quantization))
        assert plan.quantization == quantization and not plan.stored
    gpu((9, 0))
    plan = plan_launch(EngineConfig(model=str(tmp_path / "rows"), dtype="float16"))
    assert plan.quantization == "none" and not plan.stored and plan.notes[-1].endswith("not of float16")
    plan = plan_launch(EngineConfig(model=str(tmp_path / "blocks")))
    assert plan.quantization == "fp8" and plan.notes[-1].endswith("unpacked at load and rounded again")
    assert not plan.stored, "products are of blocks of 128 x 128, and these are smaller"
    assert plan_launch(EngineConfig(model=str(tmp_path / "rows"), offload_weights="1")).quantization == "none"
    gpu((8, 6))
    plan = plan_launch(EngineConfig(model=str(tmp_path / "blocks")))
    assert plan.quantization == "none" and plan.notes[-1].endswith("on compute capability 9.0")
    plan = plan_launch(EngineConfig(model=str(tmp_path / "rows")))
    assert plan.quantization == "none" and "compute capability 8.6 is older than 8.9" in plan.notes[-1]


def test_a_product_that_the_device_refuses_is_named_and_its_weights_are_unpacked(
    gpu, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails at a shape of the model alone, too."""
    right = compact._as_floats

    def refused(rows: Tensor, scales: Tensor, values: Tensor, by_output: Tensor) -> Tensor:
        if values.shape == (256, 512):
            return right(rows, scales, values, by_output)
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling cublasLtMatmul")

    gpu((12, 0))
    config = EngineConfig(model=folder, load_format="dummy", quantization="fp8")
    plan = replace(plan_launch(config), device="cpu")
    lines: list[str] = []
    sound, make = CudaBackend().prepare(config, plan, lines.append)
    assert not lines and not sound.faults
    monkeypatch.setattr(compact, "_as_floats", refused)
    plan, make = CudaBackend().prepare(config, plan, lines.append)
    assert lines == list(plan.faults)
    named = (
        f"raised RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED ({' x '.join(map(str, plan.own.matrices[0]))}); each call"
    )
    assert f"the product of 8-bit floats {named}" in lines[0]
    weight, x = (torch.randn(32, 64, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (1, 2))
    monkeypatch.undo()
    assert torch.allclose(make(weight)(x), make_float8(weight)(x), atol=0.05, rtol=0.02)
