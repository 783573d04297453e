"""Calls of transformers modules: attention, states and adapters of a forward pass are this engine's.

The modules see the tokens of a step packed in one row, each with its position, and no cache. Attention is redirected
through transformers' `AttentionInterface`, all else through context variables, so that every forward pass has its own.
"""

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import ModelLoadError
from engine.models.attention import Manner
from engine.models.linear import Linear
from engine.models.lora import Site
from engine.models.recurrent import RECUR, Recur

ATTENTION = "tidemill"
"""Name of this engine's attention among transformers' implementations."""

Attention = Callable[[nn.Module, Tensor, Tensor, Tensor, Manner], Tensor]
"""(attention module, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, e], manner) -> [T, heads · e]."""

_HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "output_attentions", "output_hidden_states", "use_cache",
    "layer_idx", "output_router_logits", "hidden_states",
}  # fmt: skip


class Adds(Protocol):
    """Receives the inputs and outputs of linear layers; see `engine.models.lora.StepAdapters`."""

    def add(self, site: Site, x: Tensor, y: Tensor) -> None: ...


_CURRENT: ContextVar[Attention] = ContextVar("attention of this forward pass")
_ADAPTERS: ContextVar[Adds | None] = ContextVar("adapters of this forward pass", default=None)
_LONG: ContextVar[Tensor | None] = ContextVar("tokens of this forward pass with long factors", default=None)


class EngineLinear(nn.Module):
    """A linear layer of this engine in place of that of transformers."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.site: Site | None = None  # set if adapters change this layer

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features)
        y = self.layer(rows)
        if self.site is not None and (adapters := _ADAPTERS.get()) is not None:
            adapters.add(self.site, rows, y)
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The unpacked weight, for modules that read it."""
        return self.layer.dense_from(0)[0]

    @property
    def bias(self) -> Tensor | None:
        return self.layer.dense_from(0)[1]


def nothing(_where: object, q: Tensor, _k: Tensor, v: Tensor, _manner: Manner) -> Tensor:
    """Return zeros in place of attention."""
    return q.new_zeros(len(q), q.shape[1] * v.shape[2])


@contextmanager
def _set(*pairs: tuple[ContextVar[Any], Any]) -> Iterator[None]:
    tokens = [(variable, variable.set(value)) for variable, value in pairs]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def rope_by_token(model: nn.Module, short_context: int) -> None:
    """Make the longrope modules of a model choose their factors by token instead of by the last position of a step."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.forward = partial(_rotate_by_token, module.forward, short_context)


def _rotate_by_token(forward: Any, short_context: int, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
    is_long = _LONG.get()
    if is_long is None:
        return tuple(forward(x, position_ids))
    short = forward(x, position_ids.masked_fill(is_long, 0))
    beyond = functional.pad(position_ids, (0, 1), value=short_context)  # one more position selects the long factors
    long = (each[:, :-1] for each in forward(x, beyond))
    return tuple(torch.where(is_long[:, None], b, a) for a, b in zip(short, long, strict=True))


def run_model(
    model: Any,
    token_ids: Tensor,
    positions: Tensor,
    attention: Attention,
    keep: Tensor,
    recur: Recur | None = None,
    adapters: Adds | None = None,
    is_long: Tensor | None = None,
) -> Tensor:
    """Return the logits [S, vocab] of tokens `keep` [S] among token_ids, positions [T].

    `recur` runs layers with a state; `adapters` are those of the T tokens. `is_long [T]`: see `RowTable`; None: no
    token.
    """
    takes = inspect.signature(model.forward).parameters
    extra = {"logits_to_keep": keep} if "logits_to_keep" in takes else {}
    with _set((_CURRENT, attention), (RECUR, recur), (_ADAPTERS, adapters), (_LONG, is_long)):
        answer = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **extra)
    logits: Tensor = answer.logits[0]
    return logits if extra else logits.index_select(0, keep)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query [1, heads, T, d] and so on -> [1, T, heads, e]."""
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise ModelLoadError(f"its attention takes the unknown argument {unknown[0]}")
    if attention_mask is not None:
        raise ModelLoadError("its attention uses a custom mask")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelLoadError("its attention is not causal")
    if dropout:
        raise ModelLoadError("its attention uses dropout")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ModelLoadError("its attention reads other tokens than those of the step")
    manner = Manner(scaling, sliding_window or None, softcap or None, s_aux)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    output = _CURRENT.get()(module, q, k, v, manner)
    return output.view(1, query.shape[2], query.shape[1], -1), None


def causal_lm() -> Any:
    """Return the class of causal language models, with this engine's attention registered."""
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register(ATTENTION, _attention)
    return transformers.AutoModelForCausalLM


@contextmanager
def quiet() -> Iterator[None]:
    """Silence reports and progress bars of transformers; errors carry the relevant information."""
    log = importlib.import_module("transformers").utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            log.set_verbosity(level)
            if bars:
                log.enable_progress_bar()
