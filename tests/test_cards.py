"""Launch plans of checkpoints on cards, without a device: what loading holds is what the plan counts, or the start is
refused in a line with both sizes."""

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tables import for_each
from torch import Tensor

from benchmarks.gpu.setup import SHAPES
from engine.build import plan_launch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution import memory
from engine.execution.cuda import backend
from engine.execution.plan import FLOAT8, LaunchPlan
from engine.models.quantized import BlockWeight, PackedWeight, StoredWeight
from engine.models.spec import ModelSpec
from engine.models.weights import build_weights, torch_dtype

CARDS = {
    "RTX 4090": ((8, 9), 24564), "L4": ((8, 9), 23034), "A100": ((8, 0), 81920), "H100": ((9, 0), 81559),
    "B200": ((10, 0), 183359), "RTX 5090": ((12, 0), 32607),
}  # fmt: skip
"""Compute capability and MiB of memory, of which 600 are taken."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": []}
CHECKPOINTS: list[tuple[str, dict[str, Any] | None]] = [
    ("8B", None), ("8B", FP8), ("8B", AWQ), ("Qwen3-30B-A3B", None), ("Qwen3-30B-A3B", GPTQ), ("gpt-oss-20b", MXFP4),
]  # fmt: skip
LAYERS = 1
"""Layers that are built: every layer holds the same, and sizes are compared for so many."""


def checkpoint(folder: Path, shape: str, packing: dict[str, Any] | None) -> Path:
    """Write a folder with a configuration, and weights of no content."""
    config = SHAPES[shape] | {"torch_dtype": "bfloat16", "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": packing} if packing else {})))
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    return folder


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Meta:
    """Tensors without content, stored as in the checkpoint of a plan."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._packing = plan.spec.packing if plan.stored else None

    def has(self, _name: str, /) -> bool:
        return True

    def fetch(self, _name: str, shape: tuple[int, ...]) -> Tensor:
        return meta(shape, torch.bfloat16)

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> StoredWeight | None:
        if self._packing is None or "embed" in name or "lm_head" in name:
            return None
        n, k = shape
        if self._packing.nibbles:
            scales, zeros = meta((n, k // 128), torch.bfloat16), meta((n, k // 128), torch.uint8)
            return PackedWeight(meta((n, k // 2), torch.uint8), scales, torch.bfloat16, zeros)
        scales = meta((n // 128, k // 128), torch.float32)
        return BlockWeight.of(meta(shape, torch.float8_e4m3fn), scales, (128, 128), torch.bfloat16)


def held_bytes(plan: LaunchPlan, spec: ModelSpec) -> int:
    """Return the bytes of the weights that are built; a plan of 8-bit floats rounds them again."""
    sizes: list[int] = []

    def make(weight: Tensor | StoredWeight, bias: Tensor | None = None, **_gated: bool) -> Any:
        parts = (*(weight if isinstance(weight, tuple) else (weight,)), bias)
        tensors = [each for each in parts if isinstance(each, Tensor)]
        rounds = plan.quantization == FLOAT8
        sizes.append(sum(each.numel() + 8 * len(each) if rounds else each.nbytes for each in tensors))
        return weight

    return build_weights(spec, Meta(plan), make).embedding.nbytes + sum(sizes)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes torch see a card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backend, "launch_refusal", lambda: None)

    def choose(name: str) -> None:
        capability, mebibytes = CARDS[name]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: ((mebibytes - 600) << 20, mebibytes << 20))

    return choose


@pytest.mark.cpu_limit(5)
@for_each(("shape", "packing"), CHECKPOINTS)
def test_a_checkpoint_fits_as_planned_or_is_refused_with_both_sizes(
    on_card: Callable[[str], None], tmp_path: Path, shape: str, packing: dict[str, Any] | None
) -> None:
    folder, fits, held = checkpoint(tmp_path, shape, packing), 0, dict[str, int]()
    for card in CARDS:
        on_card(card)
        try:
            plan = plan_launch(EngineConfig(model=str(folder), device="cuda", profile_dir=str(tmp_path)))
        except ConfigError as error:
            assert re.fullmatch(r".*\d GiB.*\d GiB.*", str(error)), f"{card}: {error}"
            assert ("install humming-kernels" in str(error)) is (packing is not None), "experts of few bits"
            continue
        fits += 1
        few = replace(plan.own, num_layers=LAYERS, windows=plan.own.windows[:LAYERS])
        planned = memory.weight_bytes(few, torch_dtype(plan.dtype), plan.quantization)
        if plan.quantization not in held:
            held[plan.quantization] = held_bytes(plan, few)
        assert held[plan.quantization] <= 1.03 * planned, f"{card}: {plan.quantization}"
    assert fits >= 3, "cards of 80 GB take it"
