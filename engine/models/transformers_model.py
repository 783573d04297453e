"""Causal language models that run transformers modules with this engine's attention, cache and linear layers.

The modules see the tokens of a step packed in one row, each with its position, and no cache. Attention is redirected
through transformers' `AttentionInterface`. Layers with a state are called request by request
(`engine.models.recurrent`). Cache requirements are read from the tensors of a forward pass without data instead of the
config. Models that would give wrong results are refused with ModelLoadError. Code from a checkpoint is never run.
"""

import importlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.errors import ModelLoadError
from engine.models.attention import Manner
from engine.models.checkpoint import Checkpoint
from engine.models.families import family_named
from engine.models.known_layers import LAYERS, Given, LayerForm, RunLayer, layer_of, observe
from engine.models.known_layers import take_over as take_over_layer
from engine.models.layer_reader import read_layer
from engine.models.linear import Linear, MakeLinear, make_linear
from engine.models.lora import AdapterPlan, Site
from engine.models.norm_reader import UnknownError
from engine.models.packing import Packing, packing_from_config
from engine.models.recurrent import (
    RECUR,
    STATES,
    Call,
    LayerState,
    Part,
    Recur,
    RecurrentState,
    begin,
    candidates,
    resumes,
    take_over,
)
from engine.models.spec import ModelShape, ModelSpec, dtype_name, eos_tokens, read_json
from engine.models.weights import TensorSource, torch_dtype

ATTENTION = "tidemill"
"""Name of this engine's attention among transformers' implementations."""

Attend = Callable[[int, Tensor, Tensor, Tensor, Manner], Tensor]
"""(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, e], manner) -> [T, heads · e]."""

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_ATTENDING = _ATTENTION_TYPES | {"hybrid", "hybrid_sliding"}
_LAYER_TYPES = _ATTENDING | STATES | {"mlp", "moe"}
_STATE_BYTES = 4  # upper bound per element
_HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "output_attentions", "output_hidden_states", "use_cache",
    "layer_idx", "output_router_logits", "hidden_states",
}  # fmt: skip
_SWITCHING_ROPES = {"dynamic", "longrope"}  # frequencies depend on the longest context of a step
_COUNTS = re.compile("layers|pattern")  # config values that count layers, not tokens
_SCANS = {"chunk_size", "mamba_chunk_size"}  # config values that only set the scan length of recurrent layers
_PROBED = 6  # tokens


@dataclass(frozen=True, slots=True)
class TransformersShape(ModelShape):
    """A model that runs transformers modules.

    Attributes:
        parameters: Number of parameters.
        layers: Names of the attention modules in order.
        longest: Longest context that is computed exactly, if shorter than all positions.
        limit: Reason of `longest`.
        recurrent: Names of the modules with a state.
        state_size: Elements of the states of a request in all recurrent layers.
    """

    parameters: int
    layers: tuple[str, ...]
    longest: int | None = None
    limit: str = ""
    recurrent: tuple[str, ...] = ()
    state_size: int = 0

    @property
    def num_parameters(self) -> int:
        return self.parameters

    @property
    def limited_by(self) -> str:
        return self.limit

    @property
    def max_context(self) -> int:
        return min(self.max_position_embeddings, self.longest or self.max_position_embeddings)

    @property
    def state_bytes(self) -> int:
        return self.state_size * _STATE_BYTES


class Seen(NamedTuple):
    """An attention call in a forward pass without data."""

    module: nn.Module
    heads: int
    kv_heads: int
    widths: tuple[int, int]
    manner: Manner


def load_shape(folder: Path) -> TransformersShape:
    """Read the shape of a checkpoint from its config. Raises ModelLoadError, one line, if it is unsupported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} has no config.json: not a Hugging Face checkpoint folder")
    raw, generation = read_json(path), folder / "generation_config.json"
    try:
        ends = eos_tokens(read_json(generation)) if generation.is_file() else frozenset[int]()
        return _shape(_config(folder, raw), raw, ends)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error.message}") from None


def _config(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Return the transformers config of a supported causal language model."""
    packing_from_config(raw)
    transformers = importlib.import_module("transformers")
    named = raw.get("model_type")
    if named not in transformers.CONFIG_MAPPING:
        own = " needs its own code (auto_map), which is never run" if raw.get("auto_map") else " is not known"
        raise ModelLoadError(f"model type {named!r}{own} (transformers {transformers.__version__})")
    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # configs raise various types
            raise ModelLoadError(f"config.json: {_first_line(error)}") from None
    _check_kind(config, raw, transformers)
    if hasattr(config, "quantization_config"):  # weights are unpacked by this engine
        del config.quantization_config
    return config


def _check_kind(config: Any, raw: Mapping[str, Any], transformers: Any) -> None:
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} is an encoder-decoder model; only decoders are supported")
    if config.get_text_config() is not config:
        raise ModelLoadError(f"{name} is a multimodal model; only text models are supported")
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is None:
        raise ModelLoadError(f"{name} is not a causal language model of transformers {transformers.__version__}")
    architecture = (raw.get("architectures") or [causal.__name__])[0]
    if architecture != causal.__name__:
        raise ModelLoadError(f"architecture {architecture!r} is not supported; of {name}, only {causal.__name__} is")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise ModelLoadError(f"{name} has layers of the unsupported type {min(kinds)}")


def _shape(config: Any, raw: Mapping[str, Any], ends: frozenset[int]) -> TransformersShape:
    with torch.device("meta"), _quiet():
        try:
            model = _causal_lm().from_config(config, attn_implementation=ATTENTION, trust_remote_code=False)
        except Exception as error:  # third-party code
            if isinstance(error, KeyError) and error.args == (ATTENTION,):
                raise ModelLoadError(f"{config.model_type} does not support custom attention") from None
            raise ModelLoadError(f"{config.model_type} fails in transformers: {_first_line(error)}") from None
    _settle(model, "batched_mm")  # the only expert implementation that runs without data
    seen, vocab_size = probe(model)
    names = {id(module): name for name, module in model.named_modules()}
    recurrent, states = _probe_states(model, seen)
    limit, reason = _context_limit(config, seen, _SCANS if recurrent else set())
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise ModelLoadError(f"{config.model_type}: the config does not set max_position_embeddings")
    # A cache cell is as wide as the widest K or V of any layer.
    kv_heads, width = max((each.kv_heads, max(each.widths)) for each in seen)
    widest = max(each.kv_heads * max(each.widths) for each in seen)
    if kv_heads * width < widest:
        kv_heads, width = 1, widest
    windows = [each.manner.window for each in seen]
    return TransformersShape(
        hidden_size=int(getattr(config, "hidden_size", width * seen[0].heads)),
        num_layers=len(seen),
        num_heads=max(each.heads for each in seen),
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        eos_token_ids=eos_tokens({"eos_token_id": config.eos_token_id}) | ends,
        dtype=dtype_name(raw),
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=tuple(names[id(each.module)] for each in seen),
        longest=limit,
        limit=reason,
        packing=packing_from_config(raw),
        windows=tuple(windows) if any(windows) else (),
        recurrent=recurrent,
        state_size=sum(state[0].numel() for parts in states.values() for state in parts.values()),
    )


def _context_limit(config: Any, seen: list[Seen], harmless: set[str]) -> tuple[int | None, str]:
    """Return the longest context that is not affected by windows, chunks or rotations that attention calls do not show,
    and the limiting property. `harmless`: config keys to ignore."""
    limits: list[tuple[int, str]] = []
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, Mapping))):
        kind = rope.get("rope_type")
        if kind in _SWITCHING_ROPES:
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            limits.append((int(original), f"{kind} rotary embedding, whose angles change after {original} tokens"))
    windows = {each.manner.window for each in seen}
    types = getattr(config, "layer_types", None) or ()
    hidden = any(
        kind == "sliding_attention" and each.manner.window is None for kind, each in zip(types, seen, strict=False)
    )
    for key, value in config.to_dict().items():
        if ("window" not in key and "chunk_size" not in key) or isinstance(value, bool) or not isinstance(value, int):
            continue
        switched_off = key == "sliding_window" and not getattr(config, "use_sliding_window", True)
        if value < 1 or switched_off or key in harmless or _COUNTS.search(key) or (value in windows and not hidden):
            continue
        limits.append((value, f"{key} of {value} tokens"))
    return min(limits, default=(None, ""))


class _Linear(nn.Module):
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


class Adds(Protocol):
    """Receives the inputs and outputs of linear layers; see `engine.models.lora.StepAdapters`."""

    def add(self, site: Site, x: Tensor, y: Tensor) -> None: ...


class _Calls:
    """Records the number of rows that each linear layer sees, call by call."""

    def __init__(self) -> None:
        self.rows: dict[Site, list[int]] = {}

    def add(self, site: Site, x: Tensor, _y: Tensor) -> None:
        self.rows.setdefault(site, []).append(len(x))


_ADAPTERS: ContextVar[Adds | None] = ContextVar("adapters of this forward pass", default=None)


def _nothing(_layer: int, q: Tensor, _k: Tensor, v: Tensor, _manner: Manner) -> Tensor:
    """Return zeros in place of attention."""
    return q.new_zeros(len(q), q.shape[1] * v.shape[2])


class Look(NamedTuple):
    """An attention layer as seen in a forward pass: its decoder layer and arguments, if replaceable, and its call."""

    layer: nn.Module | None
    given: Given | None
    seen: Seen


class TransformersModel:
    """A runnable model over T packed tokens of any requests. `shape.layers` name the attention modules."""

    def __init__(self, shape: TransformersShape, model: Any) -> None:
        self.shape = shape
        self.module = model
        self._layers = {id(model.get_submodule(name)): index for index, name in enumerate(shape.layers)}
        for index, name in enumerate(shape.recurrent):
            take_over(model.get_submodule(name), index)
        self._decoder_layers: dict[int, nn.Module] = {}
        for index, name in enumerate(shape.layers):
            above = layer_of(model, name)
            if above is not None and model.get_submodule(above) not in self._decoder_layers.values():
                self._decoder_layers[index] = model.get_submodule(above)
                take_over_layer(self._decoder_layers[index], index)
        self._forms: list[LayerForm | str] = []

    @property
    def like(self) -> Tensor:
        """A tensor of the model's type and device."""
        weight: Tensor = self.module.get_input_embeddings().weight
        return weight

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        keep: Tensor,
        recur: Recur = begin,
        adapters: "Adds | None" = None,
        layers: RunLayer | None = None,
    ) -> Tensor:
        """Return logits [S, vocab] of the tokens `keep` [S] among token_ids, positions [T].

        `recur` runs layers with a state; `adapters` are those of the T tokens; `layers` runs decoder layers and cannot
        be combined with adapters.
        """

        def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, manner: Manner) -> Tensor:
            return attend(self._layers[id(module)], q, k, v, manner)

        assert adapters is None or layers is None
        token, before = _ADAPTERS.set(adapters), None if layers is None else LAYERS.set(layers)
        try:
            return _run(self.module, token_ids, positions, attention, keep, recur)
        finally:
            _ADAPTERS.reset(token)
            if before is not None:
                LAYERS.reset(before)

    def look(self) -> list[Look]:
        """Return the attention layers in order, as currently called."""
        seen: dict[int, Seen] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner) -> Tensor:
            seen[layer] = Seen(self.module, q.shape[1], k.shape[1], (k.shape[2], v.shape[2]), manner)
            return _nothing(layer, q, k, v, manner)

        with torch.inference_mode():
            ids = torch.arange(_PROBED, device=self.like.device)
            positions = torch.linspace(0, self.shape.max_context - 1, _PROBED, device=self.like.device).long()
            given = observe(lambda: self.forward(ids, positions, attend, ids[:1]))
        return [Look(self._decoder_layers.get(each), given.get(each), seen[each]) for each in range(len(seen))]

    def layer_forms(self) -> list[LayerForm | str]:
        """Return the form of the decoder layer of each attention layer, or the reason why it is unknown."""
        if not self._forms:
            with torch.inference_mode():
                self._forms = [_form_of(look) for look in self.look()]
        return self._forms

    def linear_layers(self) -> list[Linear]:
        """Return this engine's linear layers that replace those of transformers."""
        return [each.layer for each in self.module.modules() if isinstance(each, _Linear)]

    def take_adapters(self, plans: Sequence[AdapterPlan]) -> None:
        """Attach adapters to the linear layers that they change.

        Raises ModelLoadError if a layer does not exist, has another shape, or does not see every token of a step once.
        """
        modules = {name: each for name, each in self.module.named_modules() if isinstance(each, _Linear)}
        before = {name: each.site for name, each in modules.items()}
        try:
            self._take(plans, modules)
        except ModelLoadError:
            for name, site in before.items():
                modules[name].site = site
            raise

    def _take(self, plans: Sequence[AdapterPlan], modules: Mapping[str, "_Linear"]) -> None:
        for plan in plans:
            for site, (part,) in plan.parts.items():
                layer, slot = modules.get(part.module), part.slot
                if layer is None or (layer.in_features, layer.out_features) != (slot.width, slot.size):
                    what = f"{part.module}, but the model has no such linear layer of {slot.width} x {slot.size}"
                    raise ModelLoadError(f"adapter {plan.name}: it changes {what}")
                layer.site = site
        calls = _Calls()
        with torch.inference_mode():
            ids = torch.arange(_PROBED, device=self.like.device)  # distinct tokens: experts see only some of the rows
            self.forward(ids, ids, _nothing, ids[:1], adapters=calls)
        for plan in plans:
            for site in plan.parts:
                if calls.rows.get(site) != [_PROBED]:
                    raise ModelLoadError(f"adapter {plan.name}: {site.slot} does not see each token exactly once")

    def states(self) -> dict[int, LayerState]:
        """Return the states of one request in each recurrent layer, in the types in which they are kept."""
        if not self.shape.recurrent:
            return {}

        found: dict[int, LayerState] = {}

        def recur(layer: int, call: Call, x: Tensor) -> Tensor:
            past = RecurrentState()
            output = call(x, past)
            kept = {part: state.clone() for part, state in past.parts.items()}
            found[layer] = LayerState(kept, resumes(call, x, kept))
            return output

        with torch.inference_mode():
            ids = torch.arange(2, device=self.like.device)
            self.forward(ids, ids, _nothing, ids[:1], recur)
        return found

    def rehearse(self, num_tokens: int, num_samples: int) -> None:
        """Run the memory peak of the largest step except for attention: all tokens, logits and sampling."""

        with torch.inference_mode():
            ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.like.device)
            logits = self.forward(ids, ids, _nothing, ids[:num_samples]).float()
            torch.log_softmax(logits, dim=-1).sort(dim=-1)

    @contextmanager
    def short_windows(self, tokens: int) -> Iterator[None]:
        """Limit sliding windows to `tokens` in the context, also for transformers' own attention."""
        modules = list(self.module.modules())
        holders = [*modules, *{id(m.config): m.config for m in modules if hasattr(m, "config")}.values()]
        windows = [(each, getattr(each, "sliding_window", None)) for each in holders]
        cut = [(each, window) for each, window in windows if isinstance(window, int) and window > tokens]
        for each, _ in cut:
            each.sliding_window = tokens
        try:
            yield
        finally:
            for each, window in cut:
                each.sliding_window = window

    def eager(self, token_ids: Tensor) -> Tensor:
        """Return the logits [T, vocab] of the tokens [T] of one request, computed by transformers alone."""
        config = self.module.config
        try:
            self.module.set_attn_implementation("eager")
            logits: Tensor = self.module(input_ids=token_ids[None], use_cache=False).logits[0]
            return logits
        finally:
            self.module.set_attn_implementation(ATTENTION)
            assert config._attn_implementation == ATTENTION


def _form_of(look: Look) -> LayerForm | str:
    if look.layer is None or look.given is None:
        return "its decoder layer was not found"
    try:
        return read_layer(look.layer, _Linear, look.given, _attending)
    except UnknownError as error:
        return str(error)


def load_model(
    shape: TransformersShape,
    folder: Path,
    *,
    dtype: str,
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    make: MakeLinear = make_linear,
) -> TransformersModel:
    """Load the checkpoint in `folder`, safetensors only, or create random weights with `load_format` "dummy".

    Raises ModelLoadError, one line that names the missing or wrong tensor.
    """
    kind = torch_dtype(shape.dtype if dtype == "auto" else dtype)
    config = _config(folder, read_json(folder / "config.json"))
    with _quiet():
        if load_format == "dummy":
            torch.manual_seed(seed)
            model = _causal_lm().from_config(config, dtype=kind, attn_implementation=ATTENTION)
        else:
            model = _from_safetensors(folder, config, kind, shape.packing)
    _settle(model, "grouped_mm")
    model = model.eval().requires_grad_(False).to(device)
    with torch.inference_mode():
        _replace_linear(model, make)
    return TransformersModel(shape, model)


def own_reference(
    folder: Path, spec: ModelSpec, picked: Sequence[int], tensors: TensorSource, dtype: torch.dtype
) -> Any:
    """Return the eager transformers model of a native family, with as many layers and tokens as `spec`, and its
    windows.

    `picked` are the indices of the layers in the checkpoint. Raises ModelLoadError.
    """
    config = _config(folder, read_json(folder / "config.json"))
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = spec.num_layers, spec.vocab_size, None
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in picked]
    if windows := list(filter(None, spec.windows)):
        config.sliding_window = min(windows)
    with _quiet():
        model = _causal_lm().from_config(config, dtype=dtype, attn_implementation="eager").eval().requires_grad_(False)
    heads = [f"{head}.weight" for head in family_named(spec.family).names.head]
    for name, parameter in model.state_dict().items():
        # Some checkpoints were saved without the outer model.
        spellings = (name, name.partition(".")[2], *(heads if name == "lm_head.weight" else ()))
        stored = next((each for each in spellings if tensors.has(each)), None)
        if stored is not None:
            parameter.copy_(tensors.fetch(stored, tuple(parameter.shape)))
        elif not (spec.tie_word_embeddings and parameter.shape[0] == spec.vocab_size):
            raise ModelLoadError(f"{folder} lacks tensor {name}, which the transformers model needs")
    return model


def _from_safetensors(folder: Path, config: Any, dtype: torch.dtype, packing: Packing | None) -> Any:
    kind, tensors = _causal_lm(), None
    place: Path | None = folder
    if packing is not None:
        with Checkpoint(folder, dtype, torch.device("cpu"), packing) as checkpoint, torch.no_grad():
            tensors = checkpoint.dense_tensors()
        kind, place = importlib.import_module("transformers").MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None
    try:
        model, report = kind.from_pretrained(
            place, state_dict=tensors, config=config, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True,
            trust_remote_code=False, local_files_only=True, output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # third-party code
        raise ModelLoadError(f"{folder}: {_first_line(error)}") from None
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if found := report.get(what):
            raise ModelLoadError(f"{folder} has {what.replace('_', ' ')}: {min(map(str, found))}")
    return model


def _replace_linear(model: nn.Module, make: MakeLinear) -> None:
    conv = importlib.import_module("transformers.pytorch_utils").Conv1D
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, conv):
                found: Any = child
                weight = found.weight.data if type(child) is nn.Linear else found.weight.data.t().contiguous()
                setattr(module, name, _Linear(make(weight, None if found.bias is None else found.bias.data)))


# --- calls of a forward pass --------------------------------------------------------------------------------------

_Attention = Callable[[nn.Module, Tensor, Tensor, Tensor, Manner], Tensor]
_CURRENT: ContextVar[_Attention] = ContextVar("attention of this forward pass")


def _attending(attention: _Attention, call: Callable[[], Any]) -> Any:
    """Run a callable of a model with this attention."""
    token = _CURRENT.set(attention)
    try:
        return call()
    finally:
        _CURRENT.reset(token)


def _run(
    model: Any, token_ids: Tensor, positions: Tensor, attention: _Attention, keep: Tensor, recur: Recur | None = None
) -> Tensor:
    takes = inspect.signature(model.forward).parameters
    extra = {"logits_to_keep": keep} if "logits_to_keep" in takes else {}
    token, before = _CURRENT.set(attention), RECUR.set(recur)
    try:
        answer = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **extra)
    finally:
        _CURRENT.reset(token)
        RECUR.reset(before)
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


def probe(model: Any) -> tuple[list[Seen], int]:
    """Return the attention calls of a forward pass of a few tokens, and the width of the logits.

    No weight is read, so the model may be on the meta device. Raises ModelLoadError.
    """
    seen: list[Seen] = []

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, manner: Manner) -> Tensor:
        seen.append(Seen(module, q.shape[1], k.shape[1], (k.shape[2], v.shape[2]), manner))
        return q.new_zeros(len(q), q.shape[1] * v.shape[2])

    _check_positions(model)
    model.eval()
    logits = _probe(model, attention, None)
    name, layers = model.config.model_type, getattr(model.config, "num_hidden_layers", None)
    types = getattr(model.config, "layer_types", None)
    attending = layers if types is None else sum(kind in _ATTENDING for kind in types)
    if len(seen) != attending or len({id(each.module) for each in seen}) != len(seen):
        raise ModelLoadError(f"{name} attends {len(seen)} times in {layers} layers; its other state is not supported")
    if not seen:
        raise ModelLoadError(f"{name} has no attention layer; models without keys and values are not supported")
    return seen, logits.shape[-1]


def _probe_states(model: Any, seen: list[Seen]) -> tuple[tuple[str, ...], dict[int, dict[Part, Tensor]]]:
    """Return the names of the modules with a state, in call order, and the states of one request by that order.

    The modules are redirected (`take_over`). Raises ModelLoadError.
    """
    types = getattr(model.config, "layer_types", None) or ()
    expected = {index for index, kind in enumerate(types) if kind in STATES}
    if not expected:
        return (), {}
    found: dict[int, dict[Part, Tensor]] = {}
    tried = candidates(model, expected, {id(each.module) for each in seen})
    for index, module in enumerate(tried.values()):
        take_over(module, index)

    def attention(_module: nn.Module, q: Tensor, _k: Tensor, v: Tensor, _manner: Manner) -> Tensor:
        return q.new_zeros(len(q), q.shape[1] * v.shape[2])

    _probe(model, attention, _noting(found))
    names, modules = list(tried), list(tried.values())
    layers = {getattr(modules[index], "layer_idx", None) for index, parts in found.items() if parts}
    if layers != expected:
        raise ModelLoadError(f"{model.config.model_type} has layers whose state is not found (such as {min(expected)})")
    return tuple(names[index] for index in found), dict(enumerate(found.values()))


def _noting(found: dict[int, dict[Part, Tensor]]) -> Recur:
    """Return a Recur for requests that begin; it stores their final states in `found`."""

    def recur(layer: int, call: Call, x: Tensor) -> Tensor:
        if layer in found:
            raise ModelLoadError("its layers share a module with a state")
        past = RecurrentState()
        output = call(x, past)
        found[layer] = past.parts
        return output

    return recur


def _probe(model: Any, attention: _Attention, recur: Recur | None) -> Tensor:
    """Return the logits of a few tokens. Raises ModelLoadError."""
    device, name = model.get_input_embeddings().weight.device, model.config.model_type
    ids, keep = torch.zeros(_PROBED, dtype=torch.int64, device=device), torch.tensor([_PROBED - 1], device=device)
    with torch.inference_mode(), _quiet():
        try:
            return _run(model, ids, torch.arange(_PROBED, device=device), attention, keep, recur)
        except ModelLoadError as error:
            raise ModelLoadError(f"{name} is not supported: {error.message}") from None
        except Exception as error:  # third-party code
            raise ModelLoadError(f"{name} fails in transformers: {_first_line(error)}") from None


def _check_positions(model: Any) -> None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelLoadError(f"{model.config.model_type} takes no position_ids, so tokens cannot be packed")


def _settle(model: Any, experts: str) -> None:
    """Use matrix products of fixed shapes for mixtures of experts, and skip checks for padding tokens."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation(experts)


def _causal_lm() -> Any:
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register(ATTENTION, _attention)
    return transformers.AutoModelForCausalLM


@contextmanager
def _quiet() -> Iterator[None]:
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
