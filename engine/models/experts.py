"""Mixtures of experts. Rows are sorted by expert, so that each expert is computed once for all its rows.

Native families on a GPU multiply the stacked weights in one grouped product, of ours, of torch or of
`engine.models.humming`, without a wait for the device. On a CPU the experts of transformers modules are replaced
(`replace_experts`): each has linear layers of its own, and only those with rows run.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
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


class Routing(NamedTuple):
    """Experts of T tokens, as R = T * per_token rows that are sorted by expert, then by token.

    Attributes:
        shares: Weights [T, per_token] of a token's experts.
        ends: Ends [experts] int32 of their groups of rows.
        tokens: Token [R] int32 of each row.
        numbers: Expert [R] int32 of each row.
        places: Rows [T, per_token] int32 of each token.
    """

    shares: Tensor
    ends: Tensor
    tokens: Tensor
    numbers: Tensor
    places: Tensor


def route_experts(logits: Tensor, sizes: ExpertSizes) -> Routing:
    """Choose the experts of each token, of equal ones the first, from the router's logits [T, experts]."""
    values, order = logits.float().sort(dim=-1, descending=True, stable=True)
    shares, chosen = values.softmax(-1)[:, : sizes.per_token], order[:, : sizes.per_token].flatten()
    if sizes.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    sources = chosen.argsort(stable=True)
    every = torch.arange(sizes.total, device=logits.device)
    ends = (chosen[:, None] == every).sum(0).cumsum(0, dtype=torch.int32)
    found = sources // sizes.per_token, chosen.index_select(0, sources), sources.argsort().view(shares.shape)
    shares = shares.to(logits.dtype) if sizes.rounded else shares.contiguous()
    return Routing(shares, ends, *(each.to(torch.int32) for each in found))


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return [R, out], each group of rows of x, or of rows `tokens` of x, times its weight of [experts, out, in]."""
    return functional.grouped_mm(x if tokens is None else x.index_select(0, tokens), weight.mT, offs=ends)


def product(
    layer: Linear,
    x: Tensor,
    routed: Routing,
    grouped: Callable[..., Tensor],
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the product [R, out] of a layer of all experts, and its bias [experts, out].

    x [R, in], or [T, in] with the token of each row; `grouped` multiplies weights that are not in few bits.
    """
    if isinstance(layer, ExpertsLinear):
        found = layer.by_expert(x if tokens is None else x.index_select(0, tokens), routed.ends)
        bias = layer.bias
    else:
        weight, bias = layer.dense_from(0)
        rows = () if tokens is None else (tokens,)
        found = grouped(x, weight.view(len(routed.ends), -1, weight.shape[1]), routed.ends, *rows)
    return found, None if bias is None else bias.view(len(routed.ends), -1)


def clamped_swiglu(x: Tensor, bias: Tensor, numbers: Tensor, clamp: tuple[float, float]) -> Tensor:
    """Return gate · sigmoid(gain · gate) · (up + 1) of x + bias[numbers], the gate at most `limit`, up within ±limit.

    x [R, 2·F], gate first -> [R, F]; bias [experts, 2·F]; numbers [R]; `clamp`: gain and limit.
    """
    (gate, up), (gain, limit) = (x + bias.index_select(0, numbers)).chunk(2, -1), clamp
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1).mul_(gate * torch.sigmoid(gate * gain))


def sum_experts(x: Tensor, bias: Tensor | None, routed: Routing) -> Tensor:
    """Return the sums [T, H] of each token's rows of x [R, H], plus the bias [experts, H] of their expert, times their
    shares."""
    shifted = x if bias is None else x + bias.index_select(0, routed.numbers)
    rows = shifted.index_select(0, routed.places.flatten()).view(*routed.places.shape, -1)
    return (rows * routed.shares[:, :, None]).sum(1).to(x.dtype)


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
        is_scaled = type(module).__name__ == "Llama4TextMoe"
        if not is_scaled and not (hasattr(module, "is_transposed") and hasattr(module, "has_gate")):
            continue
        kind = type(module)
        experts = _ScaledExperts(module, make) if is_scaled else _Experts(module, make)
        if kind not in tried:
            tried[kind] = experts.equals(module)
            if not tried[kind]:
                log.warning("%s differs from this engine's experts: transformers runs it, which is slower", kind)
        if tried[kind]:
            for name in experts.stored:
                delattr(experts.holder, name)  # the layers have copies
            kept: Any = module
            kept.forward, kept.replaced = partial(experts, module), True


class _Experts:
    """The experts of one module. `stored`: names of the parameters of `holder` that are not needed afterwards."""

    def __init__(self, module: Any, make: MakeLinear) -> None:
        self.holder = module
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
        return _are_close(self(module, x, chosen, shares), module(x, chosen, shares))


class _ScaledExperts(_Experts):
    """The experts of a module of Llama 4, whose inputs are multiplied by their scores, beside one that all tokens have.

    transformers multiplies every token with every expert.
    """

    def __init__(self, module: Any, make: MakeLinear) -> None:
        held = module.experts
        parts = {"gate_up_proj": held.gate_up_proj, "down_proj": held.down_proj}
        super().__init__(SimpleNamespace(**parts, is_transposed=True, has_gate=True, has_bias=False), make)
        self.holder = held

    def __call__(self, module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the sum of all experts [T, H] for hidden states [..., H], and the logits of the router."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = module.router(x)
        top = logits.topk(module.top_k, dim=1).indices
        order, counts = top.flatten().argsort(stable=True), torch.bincount(top.flatten(), minlength=len(logits[0]))
        rows = (
            x.index_select(0, order // module.top_k) * scores.gather(1, top).flatten().index_select(0, order)[:, None]
        )
        gate, up = self._up(rows, counts.tolist()).chunk(2, -1)
        result = self._down(up * module.experts.act_fn(gate), counts.tolist())
        return module.shared_expert(x) + _summed(result, order, torch.ones_like(top, dtype=x.dtype)), logits

    def equals(self, module: Any) -> bool:
        width, generator = self.holder.gate_up_proj.shape[1], torch.Generator().manual_seed(0)
        x = torch.randn(_ROWS, width, generator=generator).to(self.holder.gate_up_proj.dtype)
        (expected, _), (found, _) = module(x), self(module, x)
        return _are_close(found, expected)


def _are_close(found: Tensor, expected: Tensor) -> bool:
    step = torch.finfo(expected.dtype).eps * expected.abs().max()
    return bool((found - expected).abs().max() <= _ALLOWED * step)


def group_of(layers: Sequence[Linear]) -> Group:
    """Return a function that applies layers of one shape to groups of rows; native layers share their buffers."""
    make = getattr(layers[0], "grouped", None)
    return partial(_one_by_one, layers) if make is None else make(layers)


def _one_by_one(layers: Sequence[Linear], x: Tensor, counts: Sequence[int]) -> Tensor:
    parts = zip(layers, torch.split(x, list(counts)), strict=True)
    return torch.cat([layer(part) for layer, part in parts if len(part)])
