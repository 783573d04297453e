"""Calls of transformers modules: attention, states and adapters of a forward pass are this engine's.

The modules see the tokens of a step packed in one row, each with its position, and no cache. Attention is redirected
through transformers' `AttentionInterface`, all else through context variables, so that every forward pass has its own.

Recurrent layers of transformers modules, with a state of fixed size per request: short convolutions, gated delta
nets, state space models.

Such a module runs the tokens of one request in order and takes its state from a cache of transformers. Here it is
called with a part of a step and a `RecurrentState` in place of that cache. The caller splits the step and stores the
states (`Recur`). A module that needs more of its cache than a `RecurrentState` offers is refused.
"""

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import ModelLoadError
from engine.models.attention import Manner
from engine.models.linear import Linear
from engine.models.lora import Site

Part = tuple[str, int]
"""Kind and number of a state of a layer: ("conv" or "recurrent", the module's own number for it)."""

Call = Callable[[Tensor, "RecurrentState"], Tensor]
"""x [n, t, hidden] of n requests, and their states, which are updated -> [n, t, hidden]."""

Recur = Callable[[int, Call, Tensor], Tensor]
"""(index of the recurrent layer, its call, x [1, T, hidden] of all tokens of a step) -> [1, T, hidden]."""

STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Names in transformers of layer types with a state."""

_CACHES = ("cache_params", "cache", "past_key_values")
_IGNORED = {"position_ids", "position_embeddings", "cache_position"}


class LayerState(NamedTuple):
    """States of one request [1, ...]. `resumes`: the layer can continue from them with several tokens at once; else it
    takes tokens one at a time."""

    parts: Mapping[Part, Tensor]
    resumes: bool


RECUR: ContextVar[Recur | None] = ContextVar("function that runs the recurrent layers of this pass", default=None)


class RecurrentState:
    """States of n requests in one layer, with the cache interface that transformers modules use.

    `parts` ([n, ...] each) hold the updated states after the layer has run. Without `parts`, the requests begin.
    """

    def __init__(self, parts: Mapping[Part, Tensor] | None = None) -> None:
        self.parts: dict[Part, Tensor] = dict(parts or {})
        self._goes_on = parts is not None

    def get_conv_state(self, *_layer: int, state_idx: int = 0, **_others: Any) -> Tensor | None:
        return self.parts["conv", state_idx] if self._goes_on else None

    def get_recurrent_state(self, *_layer: int, state_idx: int = 0, **_others: Any) -> Tensor | None:
        return self.parts["recurrent", state_idx] if self._goes_on else None

    def update_conv_state(
        self, x: Tensor, *_layer: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_others: Any
    ) -> Tensor:
        """Return the input x [n, channels, t] extended by the past, and store its last `conv_kernel_size` columns."""
        if conv_kernel_size is None:
            raise ModelLoadError("its recurrent layers do not pass conv_kernel_size, the length of their past")
        if self._goes_on:
            x = torch.cat((self.parts["conv", state_idx], x), dim=-1)
        elif x.shape[-1] < conv_kernel_size:
            x = nn.functional.pad(x, (conv_kernel_size - x.shape[-1], 0))
        self.parts["conv", state_idx] = x[..., -conv_kernel_size:]
        return x

    def update_recurrent_state(self, state: Tensor, *_layer: int, state_idx: int = 0, **_others: Any) -> Tensor:
        self.parts["recurrent", state_idx] = state
        return state

    def is_recording_past(self, *_layer: int, **_others: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise ModelLoadError(f"its recurrent layers use the unknown cache attribute {name}")


def candidates(model: nn.Module, layers: set[int], attending: set[int]) -> dict[str, nn.Module]:
    """Return modules of these layers, by name, that take a cache, do not attend (`attending`: ids of those that do) and
    contain no other module that takes one."""
    takers = {name: module for name, module in model.named_modules() if name and _cache_name(module) is not None}
    return {
        name: module
        for name, module in takers.items()
        if getattr(module, "layer_idx", None) in layers
        and id(module) not in attending
        and not any(other.startswith(f"{name}.") for other in takers)
    }


def take_over(module: nn.Module, layer: int) -> None:
    """Redirect calls of the module to the function in `RECUR`, if set."""
    whole: Callable[..., Any] = module.forward
    signature, cache = inspect.signature(whole), _cache_name(module)
    assert cache is not None

    def forward(*args: Any, **kwargs: Any) -> Any:
        recur = RECUR.get()
        if recur is None:
            return whole(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        x, extra = given.pop("hidden_states"), given.pop("kwargs", {})
        given.pop(cache, None)
        passed = given | {name: each for name, each in extra.items() if name not in _IGNORED}
        foreign = sorted(name for name, each in passed.items() if isinstance(each, Tensor | tuple))
        if foreign:
            raise ModelLoadError(f"its recurrent layers take {foreign[0]}, which cannot be split by request")

        def call(part: Tensor, past: RecurrentState) -> Tensor:
            output = whole(hidden_states=part, **{cache: past}, **passed)
            if not isinstance(output, Tensor):
                raise ModelLoadError("its recurrent layers return more than the new hidden state")
            return output

        return recur(layer, call, x)

    module.forward = forward


def resumes(call: Call, x: Tensor, parts: Mapping[Part, Tensor]) -> bool:
    """Return whether the output for several tokens x [1, t, hidden] depends on the recurrent state `parts`; Mamba 1 in
    transformers ignores it and begins anew."""
    other = {part: state + 1 if part[0] == "recurrent" else state for part, state in parts.items()}
    if all(part[0] == "conv" for part in parts):
        return True
    return not torch.equal(call(x, RecurrentState(parts)), call(x, RecurrentState(other)))


def begin(layer: int, call: Call, x: Tensor) -> Tensor:
    """Run a step of first tokens without keeping their states; a `Recur`."""
    del layer
    return call(x, RecurrentState())


def _cache_name(module: nn.Module) -> str | None:
    names = inspect.signature(module.forward).parameters
    if "hidden_states" not in names:
        return None
    return next((name for name in _CACHES if name in names), None)


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
_POSITIONS: ContextVar[Tensor | None] = ContextVar("positions of this forward pass", default=None)
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


class _Positions:
    """Positions [T] of packed tokens, in the place of a cache that modules ask for the number of past tokens."""

    def __init__(self, positions: Tensor) -> None:
        self._past = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, *_layer: int) -> Tensor:
        return self._past

    def update(self, key: Tensor, value: Tensor, *_layer: int, **_others: Any) -> tuple[Tensor, Tensor]:
        return key, value


def temper_by_token(module: nn.Module) -> None:
    """Make an attention module scale its queries by their positions; Llama 4 counts the tokens of its input."""
    whole: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        positions = _POSITIONS.get()
        return whole(*args, **(kwargs if positions is None else {**kwargs, "cache": _Positions(positions)}))

    module.forward = forward


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
    now = (_CURRENT, attention), (_POSITIONS, positions), (RECUR, recur), (_ADAPTERS, adapters), (_LONG, is_long)
    with _set(*now):
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
    manner = Manner(scaling, sliding_window or None, softcap or None, s_aux, _chunk_of(module))
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    output = _CURRENT.get()(module, q, k, v, manner)
    return output.view(1, query.shape[2], query.shape[1], -1), None


def _chunk_of(module: Any) -> int | None:
    """Return the chunk of a layer, which only its mask shows in transformers."""
    config = module.config
    types = getattr(config, "layer_types", None) or ()
    is_chunked = "chunked_attention" in types and types[module.layer_idx] == "chunked_attention"
    return config.attention_chunk_size if is_chunked else None


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
