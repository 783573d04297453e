"""Experts of transformers modules by this engine's linear layers, on a CPU.

A mixture of experts stores the weights of all experts of a layer in two tensors. Here each expert has linear layers of
its own. Rows are sorted by expert, and only experts with rows are computed, each once for all its rows.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.linear import Linear, MakeLinear

log = logging.getLogger("tidemill.engine")

Group = Callable[[Tensor, Sequence[int]], Tensor]
"""Applies layers of one shape to x [S, in], in turn to as many rows as `counts` says, which add up to S: [S, out]."""

_ROWS = 5  # of the comparison with transformers
_ALLOWED = 16  # error of one row, in units of the type's step at the largest value


def replace_experts(model: nn.Module, make: MakeLinear) -> None:
    """Replace the experts of all modules that transformers dispatches to exchangeable implementations.

    Modules with other results than those of transformers keep theirs.
    """
    tried: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        if not hasattr(module, "is_transposed") or not hasattr(module, "has_gate"):
            continue
        kind = type(module)
        experts = _Experts(module, make)
        if kind not in tried:
            tried[kind] = experts.equals(module)
            if not tried[kind]:
                log.warning("%s differs from this engine's experts: transformers runs it, which is slower", kind)
        if tried[kind]:
            for name in experts.stored:
                delattr(module, name)  # the layers have copies
            module.forward = partial(experts, module)  # type: ignore[method-assign]
            module.replaced = True


class _Experts:
    """The experts of one module. `stored`: names of the parameters that are not needed afterwards."""

    def __init__(self, module: Any, make: MakeLinear) -> None:
        self._first = "gate_up_proj" if module.has_gate else "up_proj"
        self.stored: list[str] = []
        self._up = self._layers(module, self._first, make)
        self._down = self._layers(module, "down_proj", make)

    def _layers(self, module: Any, name: str, make: MakeLinear) -> Group:
        weights, bias = getattr(module, name).data, f"{name}_bias"
        weights = weights.transpose(1, 2) if module.is_transposed else weights
        biases = getattr(module, bias).data if module.has_bias else [None] * len(weights)
        self.stored += [name, bias] if module.has_bias else [name]
        return group_of([make(weight.contiguous(), each) for weight, each in zip(weights, biases, strict=True)])

    def __call__(self, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of experts `top_k_index` [T, k] for hidden states [T, H], as transformers does."""
        chosen, per_token = top_k_index.flatten(), top_k_index.shape[1]
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=module.num_experts).tolist()
        wide = self._up(hidden_states.index_select(0, order // per_token), counts)
        inner = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
        result = self._down(inner, counts)
        if module.has_post_expert_norm:
            result = module.post_expert_norm(result)
        weighted = result * top_k_weights.flatten().index_select(0, order)[:, None]
        by_token = torch.empty_like(weighted).index_copy_(0, order, weighted)
        return by_token.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def equals(self, module: Any) -> bool:
        """Return whether random rows have the same result as by transformers."""
        weight = getattr(module, self._first)
        width, generator = weight.shape[1 if module.is_transposed else 2], torch.Generator().manual_seed(0)
        x = torch.randn(_ROWS, width, generator=generator).to(weight.dtype)
        chosen = torch.stack([torch.randperm(module.num_experts, generator=generator)[:2] for _ in range(_ROWS)])
        shares = torch.rand(chosen.shape, generator=generator).to(weight.dtype)
        expected, found = module(x, chosen, shares), self(module, x, chosen, shares)
        step = torch.finfo(weight.dtype).eps * expected.abs().max()
        return bool((found - expected).abs().max() <= _ALLOWED * step)


def group_of(layers: Sequence[Linear]) -> Group:
    """Return a function that applies layers of one shape to groups of rows; native layers share their buffers."""
    make = getattr(layers[0], "grouped", None)
    return partial(_one_by_one, layers) if make is None else make(layers)


def _one_by_one(layers: Sequence[Linear], x: Tensor, counts: Sequence[int]) -> Tensor:
    parts = zip(layers, torch.split(x, list(counts)), strict=True)
    return torch.cat([layer(part) for layer, part in parts if len(part)])
