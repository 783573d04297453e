"""Checkpoints in fewer bits, written bit by bit from the formats' definitions: nothing of the reader is used.

`write(folder, name)` makes a tiny Llama whose layers are stored by FORMATS[name], and gives the weights that they stand
for; `write_dense` makes the same model as plain floats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models
import tiny_transformers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose value is in each field of a word
GROUP = 8
BLOCK = (16, 32)


class Layer(NamedTuple):
    """The stored tensors of a layer, by the last word of a name, and the weight that they stand for."""

    stored: dict[str, Tensor]
    weight: Tensor


class Format(NamedTuple):
    config: dict[str, Any]
    make: Callable[[int, int, torch.Generator], Layer]


def words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """values [rows, columns] >= 0 -> int32 [rows, words], one value after the other from the lowest bits on."""
    per = 32 // bits
    rows = []
    for row in values.tolist():
        row += [0] * (-len(row) % per)
        packed = []
        for first in range(0, len(row), per):
            word = 0
            for field in range(per):
                word |= row[first + (field if order is None else order[field])] << bits * field
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def draw(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def scales(shape: tuple[int, ...], k: int, top: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Such that weights are about as large as those of a model of this width."""
    return ((0.5 + torch.rand(shape, generator=generator)) * 1.7 / top * k**-0.5).to(dtype)


def of_groups(values: Tensor, each: Tensor, group_of: Tensor, zeros: Tensor | None = None) -> Tensor:
    """(value - zero) · scale in the type of the scales; `each`, `zeros` [n, groups]."""
    if zeros is not None:
        values = values - zeros[:, group_of]
    return values.to(each.dtype) * each[:, group_of]


def compressed_words(bits: int, group: int, symmetric: bool, act_order: bool = False) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        half, groups = 1 << bits - 1, k // group if group > 0 else 1
        group_of = torch.arange(k) // group if group > 0 else torch.zeros(k, dtype=torch.long)
        if act_order:
            group_of = group_of[torch.randperm(k, generator=generator)]
        values = draw(-half, half, (n, k), generator)
        each = scales((n, groups), k, half, torch.bfloat16, generator)
        zeros = None if symmetric else draw(-half, half, (n, groups), generator)
        stored = {
            "weight_packed": words(values + half, bits),
            "weight_scale": each,
            "weight_shape": torch.tensor([n, k]),
        }
        if zeros is not None:
            stored["weight_zero_point"] = words((zeros + half).t(), bits).t().contiguous()
        if act_order:
            stored["weight_g_idx"] = group_of.to(torch.int32)
        return Layer(stored, of_groups(values, each, group_of, zeros))

    return make


def bytes_of(kind: torch.dtype, block: tuple[int, int], dtype: torch.dtype, name: str = "weight_scale") -> Any:
    """`block`: outputs and inputs of a scale, 0 for all."""

    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        if kind == torch.int8:
            values = draw(-128, 128, (n, k), generator).to(kind)
            values[0, :2] = torch.tensor([-128, 127])
        else:
            values = (100 * torch.randn(n, k, generator=generator)).clamp(-448, 448).to(kind)
        rows, columns = (1 if not step else -(-size // step) for step, size in zip(block, (n, k), strict=True))
        each = scales((rows, columns), k, 128.0, dtype, generator)
        row, column = (
            torch.arange(size) // step if step else torch.zeros(size, dtype=torch.long)
            for step, size in zip(block, (n, k), strict=True)
        )
        weight = values.to(dtype) * each[row[:, None], column[None, :]]
        return Layer({"weight": values, name: each.reshape(()) if block == (0, 0) else each}, weight)

    return make


def awq(group: int = GROUP) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        values, zeros = draw(0, 16, (n, k), generator), draw(0, 16, (n, k // group), generator)
        each = scales((n, k // group), k, 8, torch.float16, generator)
        stored = {
            "qweight": words(values.t(), 4, AWQ_ORDER),
            "qzeros": words(zeros.t(), 4, AWQ_ORDER),
            "scales": each.t().contiguous(),
        }
        return Layer(stored, of_groups(values, each, torch.arange(k) // group, zeros))

    return make


def gptq(bits: int, less_one: int, act_order: bool = False, group: int = GROUP) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        top = 1 << bits
        group_of = torch.arange(k) // group
        if act_order:
            group_of = group_of[torch.randperm(k, generator=generator)]
        values, zeros = draw(0, top, (n, k), generator), draw(0, top, (n, k // group), generator)
        each = scales((n, k // group), k, top / 2, torch.float16, generator)
        stored = {
            "qweight": words(values, bits).t().contiguous(),
            "qzeros": words((zeros - less_one).t() % top, bits),
            "scales": each.t().contiguous(),
            "g_idx": group_of.to(torch.int32),
            "bias": torch.zeros(n, dtype=torch.float16),  # written for layers that have none, too
        }
        return Layer(stored, of_groups(values, each, group_of, zeros))

    return make


def nvfp4(body: str, factor: str, divides: bool, group: int = GROUP) -> Any:
    """Values of 4 bits, a scale of 8 bits for each group, and a factor of all scales, stored so or as a divisor."""

    def make(n: int, k: int, generator: torch.Generator) -> Layer:
        chosen = draw(0, 16, (n, k), generator)
        each = (0.5 + 4 * torch.rand((n, k // group), generator=generator)).to(_F8)
        whole = torch.tensor(2.5 * k**0.5 if divides else 0.4 * k**-0.5)
        by_group = each.float() / whole if divides else each.float() * whole
        stored = {
            body: (chosen[:, ::2] + 16 * chosen[:, 1::2]).to(torch.uint8), "weight_scale": each,
            factor: whole.reshape(1) if divides else whole,
            "input_global_scale" if divides else "input_scale": torch.ones(1),
        }  # fmt: skip
        return Layer(stored, torch.tensor(E2M1)[chosen] * by_group.repeat_interleave(group, 1))

    return make


def compressed(stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def scheme(bits: int, strategy: str, kind: str = "int", **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": None, **more}


_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_FLOAT_ROWS = {**_ROWS, "type": "float"}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "sym": False, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GROUPS = scheme(4, "group", group_size=GROUP)
_F8, _I8, _BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16

NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": GROUP, "exclude_modules": ["lm_head"]}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

FORMATS: dict[str, Format] = {
    "nvfp4": Format({"quant_method": "modelopt", **NVFP4}, nvfp4("weight", "weight_scale_2", False)),
    "nvfp4 in words": Format(
        compressed("nvfp4-pack-quantized", scheme(4, "tensor_group", "float", group_size=GROUP)),
        nvfp4("weight_packed", "weight_global_scale", True),
    ),
    "modelopt fp8": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, bytes_of(_F8, (0, 0), torch.float32)),
    "int4": Format(compressed("pack-quantized", _GROUPS), compressed_words(4, GROUP, True)),
    "int4 with zero points": Format(
        compressed("pack-quantized", {**_GROUPS, "symmetric": False}), compressed_words(4, GROUP, False)
    ),
    "int4 in act-order": Format(
        compressed("pack-quantized", {**_GROUPS, "actorder": "group"}), compressed_words(4, GROUP, True, True)
    ),
    "int4 by outputs": Format(compressed("pack-quantized", scheme(4, "channel")), compressed_words(4, -1, True)),
    "int8 in words": Format(compressed("pack-quantized", scheme(8, "channel")), compressed_words(8, -1, True)),
    "w8a8": Format(compressed("int-quantized", scheme(8, "channel"), _ROWS), bytes_of(_I8, (1, 0), _BF16)),
    "w8a8 by tensors": Format(compressed("int-quantized", scheme(8, "tensor"), _ROWS), bytes_of(_I8, (0, 0), _BF16)),
    "int8, inputs as they are": Format(compressed("int-quantized", scheme(8, "channel")), bytes_of(_I8, (1, 0), _BF16)),
    "float8 by outputs": Format(
        compressed("float-quantized", scheme(8, "channel", "float"), _FLOAT_ROWS), bytes_of(_F8, (1, 0), _BF16)
    ),
    "float8 in blocks": Format(
        compressed("float-quantized", scheme(8, "block", "float", block_structure=list(BLOCK)), _FLOAT_ROWS),
        bytes_of(_F8, BLOCK, _BF16),
    ),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "static"}, bytes_of(_F8, (0, 0), torch.float32)),
    "fp8 in blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)},
        bytes_of(_F8, BLOCK, torch.float32, "weight_scale_inv"),
    ),
    "awq": Format(_AWQ, awq()),
    "gptq": Format({**_GPTQ, "bits": 4}, gptq(4, 1)),
    "gptq v2": Format({**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, 0)),
    "gptq of 8 bits": Format({**_GPTQ, "bits": 8}, gptq(8, 1)),
    "gptq in act-order": Format({**_GPTQ, "bits": 4, "desc_act": True}, gptq(4, 1, True)),
}


NIBBLES: dict[str, Format] = {
    "int4 of 32": Format(compressed("pack-quantized", {**_GROUPS, "group_size": 32}), compressed_words(4, 32, True)),
    "int4 of 32, zero points": Format(
        compressed("pack-quantized", {**_GROUPS, "group_size": 32, "symmetric": False}), compressed_words(4, 32, False)
    ),
    "awq of 32": Format({**_AWQ, "group_size": 32}, awq(32)),
    "gptq of 32": Format({**_GPTQ, "bits": 4, "group_size": 32}, gptq(4, 1, group=32)),
}
"""Those whose 4 bits are computed with, of "llama-wide"."""
SMALL_FLOATS: dict[str, Format] = {
    "nvfp4 of 16": Format(
        {"quant_method": "modelopt", **NVFP4, "group_size": 16}, nvfp4("weight", "weight_scale_2", False, 16)
    ),
    "nvfp4 in words of 16": Format(
        compressed("nvfp4-pack-quantized", scheme(4, "tensor_group", "float", group_size=16)),
        nvfp4("weight_packed", "weight_global_scale", True, 16),
    ),
}
"""The same for 4-bit floats."""


def write(folder: Path, name: str, case: str = "llama-gqa2") -> dict[str, Tensor]:
    """The weights by name, of the types that they are computed in; see above."""
    source, chosen = tiny_models.model_folder(case), (FORMATS | NIBBLES | SMALL_FLOATS)[name]
    generator = torch.Generator().manual_seed(11)
    stored: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if ".layers." in key and tensor.dim() == 2:
            layer = chosen.make(*tensor.shape, generator)
            module = key.removesuffix(".weight")
            stored |= {f"{module}.{part}": value for part, value in layer.stored.items()}
            weights[key] = layer.weight
        else:
            stored[key] = tensor
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": chosen.config}
    tiny_models.write_config(folder, config)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def write_dense(folder: Path, weights: dict[str, Tensor], case: str = "llama-gqa2") -> None:
    """The same model with these weights, in float32."""
    source = tiny_models.model_folder(case)
    tiny_models.write_config(folder, json.loads((source / "config.json").read_text()))
    tensors = load_file(source / "model.safetensors") | {key: value.float() for key, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def mxfp4(count: int, inputs: int, outputs: int, scale: tuple[int, int], generator: torch.Generator) -> Layer:
    """Experts of gpt-oss: stored tensors by the ends of their names, and the weight [experts, in, out]. `scale`: the
    stored exponents are from the first to before the second; where there are as many as that, each is there."""
    shape = (count, outputs, inputs // 32)
    exponents = scale[0] + torch.arange(shape[0] * shape[1] * shape[2]) % (scale[1] - scale[0])
    exponents = exponents[torch.randperm(len(exponents), generator=generator)].view(shape)
    fields = draw(0, 16, (*shape, 16, 2), generator)
    weight = torch.tensor(E2M1, dtype=torch.float64)[fields] * torch.pow(2.0, exponents.double() - 127)[..., None, None]
    stored = {
        "blocks": (fields[..., 0] + 16 * fields[..., 1]).to(torch.uint8),
        "scales": exponents.to(torch.uint8),
    }
    return Layer(stored, weight.reshape(count, outputs, inputs).transpose(1, 2).to(torch.bfloat16))


def write_gpt_oss(packed: Path, plain: Path) -> dict[str, Tensor]:
    """A tiny gpt-oss twice, its experts in MXFP4 and dequantised; return the latter by name."""
    tiny_transformers.save("gpt_oss", plain)
    stored, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(11)
    weights: dict[str, Tensor] = {}
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        made = mxfp4(*stored.pop(name).shape, (122, 126), generator)
        weights[name] = made.weight
        stored |= {f"{name}_{part}": value for part, value in made.stored.items()}
    dense = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    save_file(dense | {name: each.float().contiguous() for name, each in weights.items()}, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    given = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    tiny_models.write_config(packed, config | given)
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    return weights
