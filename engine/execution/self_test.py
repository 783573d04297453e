"""A look at a model before it serves: random tokens of two requests in chunks, over our cache, beside what eager
attention by transformers gives for each of them at once. What is beyond the rounding of the type is refused with the
figure.

Windows are made short enough to matter. Of transformers' modules the loaded model itself is tested. Of a family of ours
two layers are, one of each kind where some have a window, and a few rows of its vocabulary, by the kernels that will
run it: as much as says whether we read its config as transformers does, at a cost that does not grow with the number of
layers.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.api import SamplingParams
from engine.arrays import IntArray
from engine.execution.cpu.transformers_device import MakeAttention, TransformersDevice
from engine.execution.runner import Device
from engine.models.checkpoint import Checkpoint
from engine.models.linear import MakeLinear, make_linear
from engine.models.quantized import Rounded
from engine.models.spec import ModelSpec
from engine.models.transformers_model import TransformersModel, own_reference
from engine.models.weights import ModelWeights, TensorSource, build_weights, torch_dtype
from predictor.limits import UNITS_PER_BLOCK, Limits

_CHUNKS = ((9, 1, 5, 9), (4, 1, 6, 1))  # tokens of each request in each step
_BLOCK = 16
_LONGEST = 2 * _BLOCK
_WINDOW = 7  # what longer windows are cut to: shorter than the first chunk
_LAYERS, _VOCABULARY = 2, 64
_LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")
_LEAST = 1e-4
LIMITS = Limits(len(_CHUNKS), 2 * _LONGEST, _LONGEST, 2 * len(_CHUNKS) * UNITS_PER_BLOCK, _BLOCK)
"""What a device of a test must hold."""


def test_modules(model: TransformersModel, attention: MakeAttention | None = None) -> str:
    """What is wrong with transformers' modules over our cache, with `attention` as in their device; empty where nothing
    is."""
    requests = _tokens(model.shape.vocab_size)
    with torch.inference_mode(), model.short_windows(_WINDOW):
        expected = [model.eager(torch.from_numpy(ids).to(model.like.device)) for ids in requests]
        device = TransformersDevice(model, LIMITS, attention=attention)
        return _compare(_by_chunks(device, requests), expected, model.like.dtype)


def test_family(
    spec: ModelSpec,
    folder: Path,
    dtype: str,
    device_of: Callable[[ModelSpec, ModelWeights], Device],
    make: MakeLinear = make_linear,
) -> str:
    """What is wrong with a family of ours, by the device that `device_of` makes; empty where nothing is."""
    picked = pick_layers(spec)
    windows = tuple(window and min(window, _WINDOW) for window in map(spec.window_of, picked) if spec.windows)
    small = replace(spec, num_layers=len(picked), vocab_size=min(_VOCABULARY, spec.vocab_size), windows=windows)
    kind = torch_dtype(dtype)
    requests = _tokens(small.vocab_size)
    source = Checkpoint(folder, kind, torch.device("cpu"), spec.packing, vocabulary=spec.vocab_size)
    with torch.inference_mode(), source as tensors:
        some = PickedLayers(tensors, picked)
        reference = own_reference(folder, small, picked, some, kind)
        expected = [reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0] for ids in requests]
        device = device_of(small, build_weights(small, some, make))
        return _compare(_by_chunks(device, requests), expected, kind)


def pick_layers(spec: ModelSpec) -> list[int]:
    """The first layers, or the first of each kind."""
    kinds = [spec.window_of(layer) is None for layer in range(spec.num_layers)]
    if len(set(kinds)) == 1:
        return list(range(min(_LAYERS, spec.num_layers)))
    return sorted((kinds.index(True), kinds.index(False)))


class PickedLayers:
    """Tensors of a model whose layers are some of another's."""

    def __init__(self, tensors: TensorSource, picked: list[int]) -> None:
        self._tensors, self._picked = tensors, picked

    def has(self, name: str, /) -> bool:
        return self._tensors.has(self._renamed(name))

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._tensors.fetch(self._renamed(name), shape)

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> Rounded | None:
        return self._tensors.fetch_bytes(self._renamed(name), shape)

    def _renamed(self, name: str) -> str:
        return _LAYER.sub(lambda found: f"layers.{self._picked[int(found[1])]}.", name)


def _tokens(vocab_size: int) -> list[IntArray]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, vocab_size, sum(chunks)) for chunks in _CHUNKS]


def _by_chunks(device: Device, requests: list[IntArray]) -> list[Tensor]:
    """The logits [n, vocab] that follow each request's chunks, which run side by side."""
    rows, blocks = device.rows, _LONGEST // _BLOCK
    for row, ids in enumerate(requests):
        units = np.arange(blocks * UNITS_PER_BLOCK) + row * blocks * UNITS_PER_BLOCK
        rows.tokens[row, : len(ids)], rows.num_blocks[row] = ids, blocks
        rows.k_table[row, :blocks], rows.v_table[row, :blocks] = units[::2], units[1::2]
        rows.note(row, np.arange(blocks))
        rows.sampling.write(row, SamplingParams(max_tokens=1, temperature=1.0))  # logits are wanted, not tokens
    starts, logits = [0] * len(requests), []
    for lengths in zip(*_CHUNKS, strict=True):
        step = np.array([(row, start, n, 1) for row, (start, n) in enumerate(zip(starts, lengths, strict=True))])
        logits.append(device.forward(step)[0].float().clone())
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return list(torch.stack(logits, dim=1))


def _compare(ours: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> str:
    """Errors over the spread of the logits. In 16 bits an expert may be another for a token whose scores are a tie: the
    median row counts there, the worst one in float32."""
    errors = []
    for mine, full, lengths in zip(ours, expected, _CHUNKS, strict=True):
        theirs = full.float().cpu()[np.cumsum(lengths) - 1]
        errors.append((mine.cpu() - theirs).square().mean(-1).sqrt() / theirs.std(-1).clamp(min=1e-9))
    each = torch.cat(errors)
    error = float(each.max() if dtype == torch.float32 else each.median())
    allowed = max(_LEAST, 16 * torch.finfo(dtype).eps)
    if error <= allowed:
        return ""
    return f"logits are {error:.2g} of their spread beside those of transformers, and {allowed:.2g} is rounding"
