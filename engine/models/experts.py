"""Mixtures of experts. Rows are sorted by expert, so that each expert is computed once for all its rows.

Native families on a GPU use a grouped product over the stacked weights (`mixed`), of torch or of
`engine.models.humming`. On a CPU the experts of transformers modules are replaced (`replace_experts`): each has linear
layers of its own, and only those with rows run.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.humming import ExpertsLinear
from engine.models.linear import Linear, MakeLinear
from engine.models.spec import ExpertSizes

log = logging.getLogger("tidemill.engine")

Group = Callable[[Tensor, Sequence[int]], Tensor]
"""Applies layers of one shape to x [S, in], in turn to as many rows as `counts` says, which add up to S: [S, out]."""

_ROWS = 5  # of the comparison with transformers
_ALLOWED = 16  # error of one row, in units of the type's step at the largest value


def route(logits: Tensor, sizes: ExpertSizes) -> tuple[Tensor, Tensor]:
    """Return weights and numbers [T, per_token] of each token's experts from the router's logits [T, experts]."""
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(sizes.per_token, -1)
    if sizes.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype) if sizes.rounded else weights, chosen


class Stack(NamedTuple):
    """A linear layer of all experts: (rows [S, in] sorted by expert, ends [experts] of their rows) -> [S, out], and
    bias [experts, out]."""

    product: Callable[[Tensor, Tensor], Tensor]
    bias: Tensor | None

    @classmethod
    def of(cls, layer: Linear, experts: int) -> "Stack":
        """Return the stack of a layer whose outputs are those of all experts."""
        if isinstance(layer, ExpertsLinear):
            product, bias = layer.by_expert, layer.bias
        else:
            weight, bias = layer.dense_from(0)
            stacked = weight.view(experts, -1, weight.shape[1]).mT
            product = partial(_grouped, stacked)
        return cls(product, None if bias is None else bias.view(experts, -1))


def _grouped(stacked: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return functional.grouped_mm(rows, stacked, offs=ends)


def mixed(
    x: Tensor,
    up: Stack,
    down: Stack,
    activation: Callable[[Tensor], Tensor],
    weights: Tensor,
    chosen: Tensor,
    experts: int,
) -> Tensor:
    """Return the weighted sum of experts `chosen` [T, k] of all `experts` for x [T, H]; nothing waits for the device.

    up: H -> 2 * width, down: width -> H; `activation` of a gate and what it multiplies.
    """
    order = chosen.flatten().argsort(stable=True)
    every = torch.arange(experts, device=x.device)
    ends = (chosen.flatten()[:, None] == every).sum(0).cumsum(0, dtype=torch.int32)
    rows = x.index_select(0, order // chosen.shape[1])

    def apply(stack: Stack, rows: Tensor) -> Tensor:
        result, bias = stack.product(rows, ends), stack.bias
        return result if bias is None else result + bias.index_select(0, chosen.flatten().index_select(0, order))

    return _summed(apply(down, activation(apply(up, rows))), order, weights).to(x.dtype)


def _summed(result: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the sums [T, H] of results [T * k, H], sorted by `order`, with weights [T, k]."""
    weighted = result * weights.flatten().index_select(0, order)[:, None]
    by_token = torch.empty_like(weighted).index_copy_(0, order, weighted)
    return by_token.view(*weights.shape, -1).sum(1)


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
            kept: Any = module
            kept.forward, kept.replaced = partial(experts, module), True


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
        return _summed(result, order, top_k_weights).to(hidden_states.dtype)

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
