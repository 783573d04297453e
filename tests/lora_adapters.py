"""LoRA adapters on disk as peft stores them, with random matrices, and models whose weights they are merged into."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Made:
    """An adapter: its folder, and its addition to the weight of each module."""

    folder: Path
    deltas: dict[str, Tensor]

    def merged(self, model: Any) -> Any:
        """A copy of transformers' model with W + scale · B A in the place of W."""
        changed = copy.deepcopy(model)
        with torch.no_grad():
            for name, delta in self.deltas.items():
                changed.get_submodule(name).weight += delta
        return changed


def make_adapter(
    folder: Path, model: Any, wanted: Callable[[str], bool], *, rank: int = 3, alpha: float = 6.0, seed: int = 0,
    strength: float = 1.0, **config: Any,
) -> Made:  # fmt: skip
    """An adapter of the linear modules of transformers' `model` whose last name is `wanted`."""
    found = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and wanted(name.rpartition(".")[2])
    }
    return adapter_of(folder, found, rank=rank, alpha=alpha, seed=seed, strength=strength, **config)


def adapter_of(
    folder: Path, shapes: dict[str, tuple[int, ...]], *, rank: int = 3, alpha: float = 6.0, seed: int = 0,
    strength: float = 1.0, **config: Any,
) -> Made:  # fmt: skip
    """Make an adapter of modules with weights of the given shapes [out, in]."""
    generator, tensors, deltas = torch.Generator().manual_seed(seed), dict[str, Tensor](), dict[str, Tensor]()
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    for name, (size, width) in shapes.items():
        a = torch.randn(rank, width, generator=generator) * width**-0.5
        b = torch.randn(size, rank, generator=generator) * strength
        stem = f"base_model.model.{name}.lora_"
        tensors |= {f"{stem}A.weight": a, f"{stem}B.weight": b}
        deltas[name] = scale * (b @ a)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    about = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none",
        "use_rslora": False, "use_dora": False, "modules_to_save": None, "peft_version": "0.18.0",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about | config))
    return Made(folder, deltas)
