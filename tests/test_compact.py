"""Layers of a GPU on the bits of a checkpoint, with twins of the GPU's operators on the CPU."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import packed_checkpoints
import pytest
import tiny_models
import torch
from packed_checkpoints import FORMATS
from test_cuda_backend import on_a_gpu  # noqa: F401 - a fixture
from torch import Tensor

from engine.build.plan import plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cuda import backend
from engine.execution.memory import weight_bytes
from engine.execution.plan import COMPACT, LaunchPlan
from engine.models.checkpoint import load_weights
from engine.models.compact import BY_TORCH, FEW_ROWS, Blocks, CompactLinear, Tiles, block_weight, check, make_compact
from engine.models.decoder import Decoder
from engine.models.linear import MakeLinear, make_linear
from engine.models.quantized import BlockWeight
from engine.models.spec import load_spec
from engine.models.weights import ModelWeights, matrices

CPU = torch.device("cpu")
ORDERS = {inner: torch.randperm(128 * inner, generator=torch.Generator().manual_seed(inner)) for inner in (2, 4, 8)}
"""Where the values of a tile lie, which only the operators know."""


def pack(pairs: Tensor, inner: int) -> Tensor:
    values, depth = torch.stack((pairs >> 4, pairs & 15), -1).flatten(1), 16 * inner
    tiles = values.view(len(values) // 8, 8, -1, depth).transpose(1, 2).reshape(-1, 8 * depth)[:, ORDERS[inner]]
    packed = (tiles[:, ::2] | tiles[:, 1::2] << 4).contiguous().view(torch.int32)
    return packed.view(len(values) // 8, -1, 32, inner // 2)


def multiply(x: Tensor, tiles: Tensor, group: int, both: Tensor) -> Tensor:
    """By the operator for CPUs, whose scales and zeros are those of the operator for GPUs."""
    down, along, inner = *tiles.shape[:2], 2 * tiles.shape[3]
    pairs = tiles.view(torch.uint8).view(down * along, -1)
    placed = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
    values = torch.empty_like(placed)
    values[:, ORDERS[inner]] = placed
    rows = values.view(down, along, 8, -1).transpose(1, 2).reshape(8 * down, -1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.int(), 2)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, both)


def scaled_product(rows: Tensor, by_group: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """The product that cuBLAS defines: of blocks of 128, with padded scales and groups of tokens side by side."""
    assert len(rows) % 4 == 0 and by_group.stride() == (1, len(rows))
    assert scales.shape[1] % 4 == 0 and scales.is_contiguous()
    x = rows.float().view(len(rows), -1, 128) * by_group[..., None]
    return (x.flatten(1) @ BlockWeight(values, scales, torch.float32, (128, 128)).dense().t()).bfloat16()


TILES, BLOCKS = Tiles(pack, multiply), Blocks(BY_TORCH, scaled_product)


def test_right_operators_pass_the_check_and_wrong_ones_do_not() -> None:
    assert check(CPU, tiles=TILES) == check(CPU, blocks=BLOCKS) == ""
    assert check(CPU, blocks=Blocks()).startswith("raised "), "this device has no such operator"
    assert check(CPU, tiles=Tiles()).startswith("raised ")
    lost = Tiles(lambda pairs, inner: pack(pairs & 7, inner), multiply)
    assert check(CPU, tiles=lost) == "values are lost in tiles of 4 bits (256 x 512)"
    without_zeros = Tiles(pack, lambda x, tiles, group, both: multiply(x, tiles, group, both * torch.tensor([1, 0])))
    assert check(CPU, tiles=without_zeros).startswith("differs from unpacked weights by ")
    turned = Blocks(BY_TORCH, lambda rows, by, values, scales: scaled_product(rows, by, values, scales.flip(0)))
    assert check(CPU, blocks=turned).startswith("differs")


def test_products_are_tried_at_the_shapes_of_the_plan() -> None:
    """Some fail only there; shapes that an operator does not take are unpacked."""

    def raises(rows: Tensor, by: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        if values.shape == (384, 128):
            raise RuntimeError("no algorithm\nfor this")
        return scaled_product(rows, by, values, scales)

    shapes = [(200, 130), (128, 384), (384, 128)]
    assert check(CPU, shapes=shapes[:2], blocks=Blocks(BY_TORCH, raises)) == ""
    fault = "raised RuntimeError: no algorithm (384 x 128)"
    assert check(CPU, shapes=shapes, blocks=Blocks(BY_TORCH, raises)) == fault
    groups = Tiles(pack, lambda x, tiles, group, both: multiply(x, tiles, 64, both))  # of two sizes it takes one
    assert check(CPU, shapes=shapes, group=64, tiles=groups) == ""
    assert "(256 x 512)" in check(CPU, shapes=shapes, group=32, tiles=groups)


def loaded(folder: Path, make: MakeLinear) -> tuple[ModelWeights, ModelWeights]:
    """A checkpoint on its stored bits, and unpacked."""
    spec = load_spec(folder)
    plain = load_weights(spec, folder, dtype="bfloat16")
    return load_weights(spec, folder, dtype="bfloat16", stored=True, make=make), plain


def logits(folder: Path, weights: ModelWeights, tokens: int) -> Tensor:
    """Of a forward pass without attention."""
    decoder, ids = Decoder(load_spec(folder), weights), torch.arange(tokens)
    width = decoder.spec.q_size
    hidden = decoder.run(decoder.embed(ids, ids), lambda _index, layer, x: layer.qkv(x)[:, :width])
    return decoder.logits(hidden).float()


@pytest.mark.parametrize(("name", "case"), [("awq of 32", "llama-wide"), ("fp8 in blocks", "llama-wide")])
def test_layers_on_stored_bits_equal_unpacked_ones(name: str, case: str, tmp_path: Path) -> None:
    """Few rows by the product of the device, more by unpacked weights, which have the values of the checkpoint."""
    packed_checkpoints.write(tmp_path, name, case)
    found, plain = loaded(tmp_path, partial(make_compact, tiles=TILES, blocks=BLOCKS))
    for mine, theirs in zip(matrices(found.layers[0]), matrices(plain.layers[0]), strict=True):
        assert isinstance(mine, CompactLinear)
        exact = {"rtol": 0, "atol": 0} if "fp8" in name else {"rtol": 0.01, "atol": 1e-6}  # of scales in float16
        torch.testing.assert_close(mine.dense_from(3)[0], theirs.dense_from(3)[0], **exact)
        moved = mine.on(mine.data().clone())
        assert torch.equal(moved.dense_from(0)[0], mine.dense_from(0)[0]) and moved.data().nbytes == mine.data().nbytes
    for tokens in (5, FEW_ROWS + 1):
        expected = logits(tmp_path, plain, tokens)
        error = (logits(tmp_path, found, tokens) - expected).square().mean().sqrt()
        assert float(error / expected.std()) < 0.03
    assert not isinstance(found.head, CompactLinear)


def test_blocks_of_128_are_multiplied_as_they_are() -> None:
    numbers = torch.Generator().manual_seed(3)
    dense, x = torch.randn(384, 640, generator=numbers).bfloat16(), torch.randn(2, 3, 640, generator=numbers).bfloat16()
    weight, bias = block_weight(dense), torch.randn(384, generator=numbers).bfloat16()
    assert weight.scales.shape == (3, 8) and float((weight.dense() - dense).abs().max()) < 0.2
    layer = make_compact(weight, bias, blocks=BLOCKS)
    exact = (x.float() @ weight.dense().t() + bias).bfloat16()
    assert layer(x).shape == exact.shape and not torch.equal(layer(x), exact), "inputs are rounded"
    torch.testing.assert_close(layer(x).float(), exact.float(), rtol=0.05, atol=2.0)
    assert torch.equal(make_compact(weight, bias)(x), make_linear(weight, bias)(x)), "as it would be unpacked at load"


def plan_on_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path, gigabytes: int, arch: tuple[int, int]) -> LaunchPlan:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gigabytes * 10**9, gigabytes * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: arch)
    monkeypatch.setattr("engine.execution.memory.available_memory", lambda: 10**11)
    return plan_launch(EngineConfig(model=str(folder), self_test=False, max_model_len=256))


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
OF_32B = QWEN3 | {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600,
    "quantization_config": {**FORMATS["awq"].config, "group_size": 128}, "torch_dtype": "float16",
}  # fmt: skip
OF_30B_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "intermediate_size": 6144, "quantization_config": {**FORMATS["awq"].config, "group_size": 128},
}  # fmt: skip
OF_8B = QWEN3 | {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
    "quantization_config": {**FORMATS["fp8 in blocks"].config, "weight_block_size": [128, 128]},
}  # fmt: skip

OF_8B_FLOATS = {name: value for name, value in OF_8B.items() if name != "quantization_config"}


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("shape", "gigabytes", "arch", "kind", "weights"),
    [
        (OF_32B, 24, (8, 9), "stored int4", (18.5e9, 20e9)),
        (OF_32B, 80, (7, 5), "none", (65e9, 66e9)),
        (OF_8B, 80, (9, 0), "fp8 blocks", (9.3e9, 9.5e9)),
        (OF_8B, 80, (8, 0), "none", (16e9, 17e9)),
        (OF_8B, 16, (8, 0), "fp8 blocks", (9.3e9, 9.5e9)),
        (OF_8B, 16, (8, 9), "fp8", (8.6e9, 8.9e9)),
        (OF_8B, 180, (10, 0), "fp8", (8.6e9, 8.9e9)),
        (OF_30B_MOE, 80, (9, 0), "stored int4", (59e9, 60e9)),
    ],
)
def test_plans_say_what_stays_packed(
    shape: dict[str, Any], gigabytes: int, arch: tuple[int, int], kind: str, weights: tuple[float, float],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Qwen3-32B-AWQ fits 24 GB. Qwen3-8B-FP8 stays packed where cuBLAS has products of blocks, or nothing else fits.

    It is rounded again where the card multiplies other 8-bit floats. Experts count as unpacked.
    """
    tiny_models.write_config(tmp_path, tiny_models.llama_config(**shape))
    (tmp_path / "model.safetensors").touch()
    plan = plan_on_gpu(monkeypatch, tmp_path, gigabytes, arch)
    assert plan.quantization == kind and weights[0] < plan.weight_bytes < weights[1]
    assert plan.num_blocks > 50 and ("as they are stored" in plan.notes[-1]) is (kind in COMPACT)
    assert ("unpacked at load and rounded again" in plan.notes[-1]) is (kind == "fp8")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("shape", "gigabytes", "arch", "message"),
    [
        (OF_32B, 12, (8, 9), r"take 18\.\d+ GiB \(AWQ int4 in groups of 128\), and the GPU has 9"),
        (
            OF_30B_MOE,
            24,
            (8, 9),
            r"take 55\.\d+ GiB \(AWQ.*: its experts are unpacked to bfloat16\), .* has 19",
        ),
        (
            OF_8B_FLOATS,
            16,
            (8, 9),
            r"15\.\d+ GiB, and the GPU has 12.*--offload-weights.*--quantization fp8 \(8\.2",
        ),
        (
            OF_8B_FLOATS,
            16,
            (8, 0),
            r"use a smaller checkpoint or a larger GPU, or set --offload-weights .*batches$",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_both_sizes(
    shape: dict[str, Any], gigabytes: int, arch: tuple[int, int], message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    tiny_models.write_config(tmp_path, tiny_models.llama_config(**shape))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=message):
        plan_on_gpu(monkeypatch, tmp_path, gigabytes, arch)


def test_planned_bytes_are_those_of_the_layers(tmp_path: Path) -> None:
    """But for norms, embeddings and head, which stay as they are."""
    for name, case, kind in (("fp8 in blocks", "llama-wide", "fp8 blocks"), ("awq of 32", "llama-wide", "stored int4")):
        packed_checkpoints.write(tmp_path, name, case)
        spec = load_spec(tmp_path)
        found, _ = loaded(tmp_path, partial(make_compact, tiles=TILES))
        held = sum(
            part.nbytes if part.dim() != 1 else 0
            for layer in found.layers
            for matrix in matrices(layer)
            for part in vars(matrix._weight).values()  # type: ignore[attr-defined]
            if isinstance(part, Tensor)
        )
        rest = spec.num_parameters - spec.num_layers * sum(n * k for n, k in spec.matrices)
        planned = weight_bytes(spec, torch.bfloat16, kind) - 2 * rest
        assert held <= planned * 1.02 and planned <= held * 1.1


@pytest.mark.usefixtures("on_a_gpu")
def test_an_operator_that_fails_is_named_and_its_weights_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_checkpoints.write(tmp_path, "awq of 32", "llama-wide")
    plan = replace(plan_on_gpu(monkeypatch, tmp_path, 24, (8, 0)), device="cpu")
    lines: list[str] = []
    plan, make = backend.CudaBackend().prepare(EngineConfig(), plan, lines.append)
    assert lines == list(plan.faults) and lines[0].startswith("the product of stored int4 layers raised ")
    found, plain = loaded(tmp_path, make)
    assert torch.allclose(logits(tmp_path, found, 3), logits(tmp_path, plain, 3), atol=0.1)
