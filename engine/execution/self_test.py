"""Self-test of a model at load: logits of two random requests, run in chunks over the engine's cache, are compared with
those of eager attention in transformers. A model whose error exceeds the rounding of its type is refused.

Windows are shortened so that they take effect. For transformers modules, the loaded model itself is tested. For native
families, two layers (one of each kind if some have a window) and a few vocabulary rows are tested. This suffices to
check that the config and the tensors are read as in transformers, at a cost independent of the number of layers.
Quantized layers are compared with transformers' modules over layers that are rounded in the same way.
"""

import math
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
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.models.checkpoint import Checkpoint
from engine.models.linear import MakeLinear, make_linear
from engine.models.quantized import StoredWeight
from engine.models.spec import ModelSpec
from engine.models.transformers_model import TransformersModel, own_reference
from engine.models.weights import ModelWeights, TensorSource, build_weights, torch_dtype

_CHUNKS = ((9, 1, 5, 9), (4, 1, 6, 1))  # tokens per step of each request
_BLOCK = 16
_LONGEST = 2 * _BLOCK
_WINDOW = 7  # limit for windows, shorter than the first chunk
_LAYERS, _VOCABULARY = 2, 64
_LAYER = re.compile(r"(?<![^.])layers\.(\d+)\.")
_LEAST = 1e-4
_LEAST_ROUNDED = 0.1
"""Smallest allowed error of layers in 8 bits: an input on the border of two integers may be rounded either way, and a
weight that is stored in 8 bits is rounded again for the reference."""
LIMITS = Limits(len(_CHUNKS), 2 * _LONGEST, _LONGEST, 2 * len(_CHUNKS) * UNITS_PER_BLOCK, _BLOCK)
"""Minimum limits of a tested device."""


def test_modules(model: TransformersModel, attention: MakeAttention | None = None) -> str:
    """Test transformers modules over the engine's cache with `attention` as in their device. Return the error, or an
    empty string."""
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
    reference_make: MakeLinear = make_linear,
    *,
    rounds: bool = False,
    stored: bool = False,
) -> str:
    """Test a native family on the device made by `device_of`. Return the error, or an empty string.

    Args:
        make: Makes the linear layers of the tested device.
        reference_make: Makes those of the transformers model.
        rounds: Whether layers round their inputs to 8 bits.
        stored: Whether layers that are stored in 8 or 4 bits compute with these bits.
    """
    picked = pick_layers(spec)
    windows = tuple(window and min(window, _WINDOW) for window in map(spec.window_of, picked) if spec.windows)
    small = replace(spec, num_layers=len(picked), vocab_size=min(_VOCABULARY, spec.vocab_size), windows=windows)
    kind = torch_dtype(dtype)
    requests = _tokens(small.vocab_size)
    source = Checkpoint(folder, kind, torch.device("cpu"), spec.packing, vocabulary=spec.vocab_size, stored=stored)
    with torch.inference_mode(), source as tensors:
        some = PickedLayers(tensors, picked)
        reference = own_reference(folder, small, picked, some, kind, reference_make)
        expected = [reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0] for ids in requests]
        device = device_of(small, build_weights(small, some, make))
        return _compare(_by_chunks(device, requests), expected, kind, _LEAST_ROUNDED if rounds else _LEAST)


def pick_layers(spec: ModelSpec) -> list[int]:
    """Return the first layers, or the first layer of each kind."""
    kinds = [spec.window_of(layer) is None for layer in range(spec.num_layers)]
    if len(set(kinds)) == 1:
        return list(range(min(_LAYERS, spec.num_layers)))
    return sorted((kinds.index(True), kinds.index(False)))


class PickedLayers:
    """A TensorSource whose layers are a selection of another's."""

    def __init__(self, tensors: TensorSource, picked: list[int]) -> None:
        self._tensors, self._picked = tensors, picked

    def has(self, name: str, /) -> bool:
        return self._tensors.has(self._renamed(name))

    def fetch(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._tensors.fetch(self._renamed(name), shape)

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> StoredWeight | None:
        return self._tensors.fetch_bytes(self._renamed(name), shape)

    def _renamed(self, name: str) -> str:
        return _LAYER.sub(lambda found: f"layers.{self._picked[int(found[1])]}.", name)


def _tokens(vocab_size: int) -> list[IntArray]:
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, vocab_size, sum(chunks)) for chunks in _CHUNKS]


def _by_chunks(device: Device, requests: list[IntArray]) -> list[Tensor]:
    """Return the logits [n, vocab] after each chunk of each request; the requests run in the same steps."""
    rows, blocks = device.rows, _LONGEST // _BLOCK
    for row, ids in enumerate(requests):
        units = np.arange(blocks * UNITS_PER_BLOCK) + row * blocks * UNITS_PER_BLOCK
        rows.tokens[row, : len(ids)], rows.num_blocks[row] = ids, blocks
        rows.k_table[row, :blocks], rows.v_table[row, :blocks] = units[::2], units[1::2]
        rows.note(row, np.arange(blocks))
        rows.sampling.write(row, SamplingParams(max_tokens=1, temperature=1.0))  # only the logits are used
    starts, logits = [0] * len(requests), []
    for lengths in zip(*_CHUNKS, strict=True):
        step = np.array([(row, start, n, 1) for row, (start, n) in enumerate(zip(starts, lengths, strict=True))])
        logits.append(device.forward(step)[0].float().clone())
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return list(torch.stack(logits, dim=1))


def _compare(ours: list[Tensor], expected: list[Tensor], dtype: torch.dtype, least: float = _LEAST) -> str:
    """Compare logits by error relative to their standard deviation; return the difference, or an empty string.

    float32 uses the worst row. 16-bit types use the median row, because a tie of expert scores may select another
    expert.
    """
    errors = []
    for mine, full, lengths in zip(ours, expected, _CHUNKS, strict=True):
        theirs = full.float().cpu()[np.cumsum(lengths) - 1]
        errors.append((mine.cpu() - theirs).square().mean(-1).sqrt() / theirs.std(-1).clamp(min=1e-9))
    each = torch.cat(errors)
    error = float(each.max() if dtype == torch.float32 else each.median())
    allowed = max(least, 16 * torch.finfo(dtype).eps)
    if error <= allowed:
        return ""
    if not math.isfinite(error):
        return f"logits are NaN or infinite in {str(dtype).removeprefix('torch.')}; set --dtype"
    return f"logits differ from those of transformers by {error:.2g} of their spread; rounding allows {allowed:.2g}"
