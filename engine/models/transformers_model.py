"""Causal language models that run transformers modules with this engine's attention, cache and linear layers.

Layers with a state are called request by request (`engine.models.transformers_calls`).
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.errors import ModelLoadError, first_line
from engine.models.attention import Manner
from engine.models.checkpoint import Checkpoint, is_finite
from engine.models.experts import replace_experts
from engine.models.linear import MakeLinear, make_linear
from engine.models.lora import AdapterPlan, Site
from engine.models.packing import Packing
from engine.models.spec import ModelSpec, read_json, text_part
from engine.models.stored_tensors import files_of, weight_files
from engine.models.transformers_calls import (
    ATTENTION,
    Adds,
    Call,
    EngineLinear,
    LayerState,
    Recur,
    RecurrentState,
    begin,
    causal_lm,
    nothing,
    quiet,
    resumes,
    rope_by_token,
    run_model,
    take_over,
    temper_by_token,
)
from engine.models.transformers_shape import PROBED, TransformersShape, config_of, settle
from engine.models.weights import TensorSource, router_of, stacked_experts, torch_dtype

_SPANS = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Numbers of tokens after which attention changes: windows, chunks, the steps of Llama 4's temperature."""

Attend = Callable[[int, Tensor, Tensor, Tensor, Manner], Tensor]
"""(layer, q [T, heads, d], k [T, kv_heads, d], v [T, kv_heads, e], manner) -> [T, heads · e]."""


class _Calls:
    """Records the number of rows that each linear layer sees, call by call."""

    def __init__(self) -> None:
        self.rows: dict[Site, list[int]] = {}

    def add(self, site: Site, x: Tensor, _y: Tensor) -> None:
        self.rows.setdefault(site, []).append(len(x))


class TransformersModel:
    """A runnable model over T packed tokens of any requests. `shape.layers` name the attention modules."""

    def __init__(self, shape: TransformersShape, model: Any) -> None:
        self.shape = shape
        self.module = model
        self._layers = {id(model.get_submodule(name)): index for index, name in enumerate(shape.layers)}
        for index, name in enumerate(shape.recurrent):
            take_over(model.get_submodule(name), index)
        for name in shape.layers:
            if getattr(model.get_submodule(name), "attn_temperature_tuning", False):
                temper_by_token(model.get_submodule(name))
        if shape.short_context:
            rope_by_token(model, shape.short_context)

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
        is_long: Tensor | None = None,
    ) -> Tensor:
        """See `run_model`."""

        def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, manner: Manner) -> Tensor:
            return attend(self._layers[id(module)], q, k, v, manner)

        return run_model(self.module, token_ids, positions, attention, keep, recur, adapters, is_long)

    def take_adapters(self, plans: Sequence[AdapterPlan]) -> None:
        """Attach adapters to the linear layers that they change.

        Raises ModelLoadError if a layer does not exist, has another shape, or does not see every token of a step once.
        """
        modules = {name: each for name, each in self.module.named_modules() if isinstance(each, EngineLinear)}
        for plan in plans:
            for site, (part,) in plan.parts.items():
                layer, slot = modules.get(part.module), part.slot
                if layer is None or (layer.in_features, layer.out_features) != (slot.width, slot.size):
                    what = f"{part.module}, but the model has no such linear layer of {slot.width} x {slot.size}"
                    raise ModelLoadError(f"adapter {plan.name}: it changes {what}")
                layer.site = site
        calls = _Calls()
        with torch.inference_mode():
            ids = torch.arange(PROBED, device=self.like.device)  # distinct tokens: experts see only some of the rows
            self.forward(ids, ids, nothing, ids[:1], adapters=calls)
        for plan in plans:
            for site in plan.parts:
                if calls.rows.get(site) != [PROBED]:
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
            self.forward(ids, ids, nothing, ids[:1], recur)
        return found

    def rehearse(self, num_tokens: int, num_samples: int) -> None:
        """Run the memory peak of the largest step except for attention: all tokens, logits and sampling."""

        with torch.inference_mode():
            ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.like.device)
            logits = self.forward(ids, ids, nothing, ids[:num_samples]).float()
            torch.log_softmax(logits, dim=-1).sort(dim=-1)

    @contextmanager
    def short_windows(self, tokens: int) -> Iterator[None]:
        """Limit spans (`_SPANS`) to `tokens` in the context, also for transformers' own attention."""
        modules = list(self.module.modules())
        holders = [*modules, *{id(m.config): m.config for m in modules if hasattr(m, "config")}.values()]
        spans = [(each, name, getattr(each, name, None)) for each in holders for name in _SPANS]
        cut = [(each, name, span) for each, name, span in spans if isinstance(span, int) and span > tokens]
        for each, name, _ in cut:
            setattr(each, name, tokens)
        try:
            yield
        finally:
            for each, name, span in cut:
                setattr(each, name, span)

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


def load_model(
    shape: TransformersShape,
    folder: Path,
    *,
    dtype: str,
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    make: MakeLinear = make_linear,
) -> TransformersModel:
    """Load the checkpoint in `folder`, safetensors only, or create random weights with `load_format` "dummy".

    Raises ModelLoadError, one line that names the missing or wrong tensor.
    """
    kind = torch_dtype(shape.dtype if dtype == "auto" else dtype)
    config = config_of(folder, text_part(folder, read_json(folder / "config.json")))
    with quiet():
        if load_format == "dummy":
            torch.manual_seed(0)
            model = causal_lm().from_config(config, dtype=kind, attn_implementation=ATTENTION)
        else:
            model = _from_safetensors(folder, config, kind, shape.packing)
    settle(model, "grouped_mm")
    model = model.eval().requires_grad_(False).to(device)
    with torch.inference_mode():
        _replace_linear(model, make)
        if model.device.type == "cpu":  # on a GPU a grouped product runs all experts without waiting for the device
            replace_experts(model, make)
    return TransformersModel(shape, model)


def own_reference(
    folder: Path,
    spec: ModelSpec,
    picked: Sequence[int],
    tensors: TensorSource,
    dtype: torch.dtype,
    make: MakeLinear = make_linear,
) -> Any:
    """Return the eager transformers model of a native family, with as many layers and tokens as `spec`, and its
    windows.

    `picked` are the indices of the layers in the checkpoint; `make` makes the linear layers. Raises ModelLoadError.
    """
    config = config_of(folder, text_part(folder, read_json(folder / "config.json")))
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = spec.num_layers, spec.vocab_size, None
    config.tie_word_embeddings = spec.tie_word_embeddings
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in picked]
    if windows := list(filter(None, spec.windows)):
        config.sliding_window = min(windows)
    with quiet():
        model = causal_lm().from_config(config, dtype=dtype, attn_implementation="eager").eval().requires_grad_(False)
    family = spec.family
    renamed = family.experts is not None and not family.experts.fused
    heads = [f"{head}.weight" for head in family.names.head]
    for name, parameter in model.state_dict().items():
        # Some checkpoints were saved without the outer model.
        if renamed and (parameter.dim() > 2 or name.endswith(".gate.weight")):
            continue
        spellings = (name, name.partition(".")[2], *(heads if name == "lm_head.weight" else ()))
        stored = next((each for each in spellings if tensors.has(each)), None)
        if stored or not (spec.tie_word_embeddings and parameter.shape[0] == spec.vocab_size):
            parameter.copy_(tensors.fetch(stored or name, tuple(parameter.shape)))
    if renamed:
        _fill_experts(model, spec, tensors)
    _replace_linear(model, make)
    return model


def _fill_experts(model: Any, spec: ModelSpec, tensors: TensorSource) -> None:
    """Fill the experts and routers of a model, whose tensors are stored under other names."""
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        (up, _), (down, _) = stacked_experts(spec, tensors, prefix)
        for kept, stored in (
            (layer.mlp.gate.weight, router_of(spec, tensors, prefix)),
            (layer.mlp.experts.gate_up_proj, up),
            (layer.mlp.experts.down_proj, down),
        ):
            kept.copy_(cast(Tensor, stored).view_as(kept))


def _from_safetensors(folder: Path, config: Any, dtype: torch.dtype, packing: Packing | None) -> Any:
    kind, tensors = causal_lm(), None
    place: Path | None = folder
    weight_files(folder)  # reports missing files
    with Checkpoint(folder, dtype, torch.device("cpu"), packing) as checkpoint, torch.no_grad():
        if packing is not None or checkpoint.is_part:
            tensors = checkpoint.dense_tensors()
    if tensors is not None:
        kind, place = importlib.import_module("transformers").MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None
    try:
        model, report = kind.from_pretrained(
            place, state_dict=tensors, config=config, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True,
            trust_remote_code=False, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as error:  # third-party code
        raise ModelLoadError(f"{folder}: {first_line(error)}") from None
    if wrong := _fault_of(folder, model, report):
        raise ModelLoadError(f"{folder}: {wrong}")
    return model


def _fault_of(folder: Path, model: Any, report: Mapping[str, Any]) -> str:
    """Return the first difference between the stored tensors and those of the loaded model, or an empty string."""
    if found := sorted(report.get("missing_keys") or ()):
        return f"it lacks tensor {found[0]} ({files_of(folder, found[0])})"
    if found := sorted(report.get("mismatched_keys") or ()):
        name, stored, implied = found[0]
        return f"tensor {name} ({files_of(folder, name)}) is {list(stored)}, config.json implies {list(implied)}"
    if found := sorted(report.get("unexpected_keys") or ()):
        return f"it has tensors this model does not use: {found[0]} ({files_of(folder, found[0])})"
    for error in report.get("error_msgs") or ():
        return str(error)
    damaged = (name for name, parameter in model.named_parameters() if not is_finite(parameter.data))
    for name in damaged:
        return f"tensor {name} ({files_of(folder, name)}) has NaN or infinity: it is damaged, or does not fit the type"
    return ""


def _replace_linear(model: nn.Module, make: MakeLinear) -> None:
    conv = importlib.import_module("transformers.pytorch_utils").Conv1D
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, conv):
                found: Any = child
                weight = found.weight.data if type(child) is nn.Linear else found.weight.data.t().contiguous()
                setattr(module, name, EngineLinear(make(weight, None if found.bias is None else found.bias.data)))
