"""Stands for the library humming-kernels: its layer, with its names, shapes and types, by torch operators.

`install` makes `import humming.layer` find it. A weight is decoded from the definition of its format; once transformed,
its bytes lie in another order and are padded, so that only the library can read them."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

BITS = {"uint4": 4, "float4e2m1": 4, "float8e4m3": 8}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 [..., w] -> [..., w * 32 / bits], the lowest bits first."""
    parts = [(words.long() >> place) & (1 << bits) - 1 for place in range(0, 32, bits)]
    return torch.stack(parts, -1).flatten(-2)


class HummingLayer(nn.Module):
    fault = ""
    """"raises": every product does; "wrong": products of more than 100 rows are."""

    def __init__(
        self, shape_n: int, shape_k: int, weight_config: dict[str, Any], input_config: Any = None,
        pad_n_to_multiple: int = 1, pad_k_to_multiple: int = 1, num_experts: int | None = None, has_bias: bool = False,
        torch_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert torch_dtype == torch.bfloat16 and not has_bias and input_config is None
        self.sides, self.experts, self.kind = (shape_n, shape_k), num_experts, weight_config["dtype"]
        self.pads = [-shape_n % pad_n_to_multiple, -shape_k % pad_k_to_multiple]
        bits, group = BITS[self.kind], weight_config["group_size"]
        self.bits, self.group = bits, group
        known = {"dtype", "group_size", "has_zero_point", "scale_dtype"}
        assert weight_config.keys() <= known and group >= 16 and group & (group - 1) == 0
        scale = torch.float8_e8m0fnu if weight_config.get("scale_dtype") == "float8e8m0" else torch_dtype
        self.shapes = {
            "weight": ((shape_n, shape_k * bits // 32), torch.int32),
            "weight_scale": ((shape_n, shape_k // group), scale),
        }
        if weight_config.get("has_zero_point"):
            self.shapes["zero_point"] = ((shape_n * bits // 32, shape_k // group), torch.int32)
        for name, (shape, dtype) in self.shapes.items():
            whole = shape if num_experts is None else (num_experts, *shape)
            setattr(self, name, nn.Parameter(torch.empty(whole, dtype=dtype), requires_grad=False))

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        assert tensors.keys() == self.shapes.keys()
        for name, tensor in tensors.items():
            own = getattr(self, name)
            assert (tensor.shape, tensor.dtype, tensor.device) == (own.shape, own.dtype, own.device), name
        self.load_state_dict(tensors, strict=False)

    def transform(self) -> None:
        n, k = self.pads
        padded = functional.pad(self.weight, (0, k * self.bits // 32, 0, n)).flip(-1).contiguous()
        self.weight = nn.Parameter(padded, requires_grad=False)

    def _dense(self) -> Tensor:
        """The weights [experts, n, k] float32."""
        n, k = self.sides
        words = self.weight.flip(-1)[..., :n, : k * self.bits // 32].contiguous()
        values = (words.view(torch.float8_e4m3fn) if self.bits == 8 else fields(words, 4)).float()
        if self.kind == "float4e2m1":
            values = torch.tensor([*E2M1, *(-each for each in E2M1)])[values.long()]
        if "zero_point" in self.shapes:
            zeros = fields(self.zero_point.transpose(-1, -2), 4).transpose(-1, -2)
            values = values - zeros.repeat_interleave(self.group, -1)
        return (values * self.weight_scale.float().repeat_interleave(self.group, -1)).view(-1, n, k)

    def forward(
        self, inputs: Tensor, outputs: Any = None, input_scale: Any = None, input_scale_2: Any = None,
        sorted_ids: Any = None, expert_ids: Any = None, num_tokens_padded: Any = None,
        expert_layout: Tensor | None = None, top_k: int = 1, valid_shape_m: int = 0, compute_config: str | None = None,
    ) -> Tensor:  # fmt: skip
        if self.fault == "raises":
            raise RuntimeError("no kernel image is available\nand more")
        assert inputs.dtype == torch.bfloat16 and inputs.is_contiguous() and inputs.shape[1] == self.sides[1]
        if inputs.is_meta:
            return inputs.new_empty(len(inputs), self.sides[0])
        dense, x = self._dense(), inputs.float()
        if self.experts is None:
            assert expert_layout is None and compute_config is None
            found = x @ dense[0].t()
        else:
            assert json.loads(str(compute_config)) == {"gemm_type": "grouped_contiguous"}
            assert expert_layout is not None and expert_layout.shape == (self.experts + 1,)
            ends = expert_layout.tolist()
            assert ends[0] == 0 and ends[-1] == len(x)
            parts = zip(ends, ends[1:], dense, strict=False)
            found = torch.cat([x[first:last] @ weight.t() for first, last, weight in parts])
        if self.fault == "wrong" and len(inputs) > 100:
            found[:, ::3] *= 1.2
        return found.to(torch.bfloat16)


def install(patch: pytest.MonkeyPatch) -> type[HummingLayer]:
    """For one test; gives its class of layers."""
    for name in ("humming", "humming.layer"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        patch.setitem(sys.modules, name, module)
    layers = type("HummingLayer", (HummingLayer,), {})
    patch.setattr(sys.modules["humming.layer"], "HummingLayer", layers, raising=False)
    patch.setattr("engine.models.humming._faults", [])
    return layers
