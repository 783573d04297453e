"""What a step tells the device: one persistent buffer, filled in place on the host and uploaded by one copy.

Every bucket reads the first part of the same tensors, so their addresses never change and a captured graph finds the
next step's data where it found the last one's. Knows nothing of models or of who decided the step.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.execution.arrays import Int32Array, IntArray
from engine.execution.cuda.shapes import StepShape
from engine.execution.layout import Layout
from engine.execution.rows import RowTable
from engine.execution.sampling_table import uniforms
from engine.models.spec import ModelSpec
from engine.triton_kernels import configs
from engine.triton_kernels.work import DecodeWork, PrefillWork, WorkBuffer, aligned
from predictor.limits import Limits

_CHANGES = 4096  # table entries in the buffer; a step with more sends the rest by itself
_SLACK = 256  # what aligning the parts may take


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A shape's view of the device's side; T tokens, S samples.

    `ids [T]`: negative where the token is the one sampled last for `source [T]`; `positions [T]`; `rows [T]`: -1 for
    padding; `sample_tokens [S]`: which of the T are sampled, for rows `sample_rows [S]`. `partial`, `partial_lse`:
    scratch of the decode kernel.
    """

    shape: StepShape
    ids: Tensor
    source: Tensor
    positions: Tensor
    rows: Tensor
    sample_tokens: Tensor
    sample_rows: Tensor
    decode: DecodeWork
    prefill: PrefillWork
    partial: Tensor
    partial_lse: Tensor


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Sampling parameters of S rows on the device, neutral where a row has no such wish. `uniform` float64; `top_k`
    int32; the others float32. `most_top_k`: the largest, 0 if none; `any_*`: whether any row is not neutral."""

    uniform: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    most_top_k: int
    any_top_p: bool
    any_min_p: bool


class StepBuffers:
    """The decode scratch is shared by all layers and shapes."""

    def __init__(self, spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: torch.device) -> None:
        max_tokens, max_samples = limits.max_num_batched_tokens, limits.max_num_seqs
        arch, group = configs.device_arch(device), spec.num_heads // spec.num_kv_heads
        self._tile_tokens = configs.prefill_config(arch, spec.head_dim, dtype).block_m // group
        decode_tile = configs.decode_config(arch, spec.head_dim, group, dtype).block_n
        self._decode_items = partial(
            configs.decode_items, num_kv_heads=spec.num_kv_heads, num_multiprocessors=_multiprocessors(device)
        )
        items = self._decode_items(max_samples)
        tiles = configs.prefill_items(max_tokens, max_samples, self._tile_tokens)
        shapes = (*DecodeWork.shapes(max_samples, items), *PrefillWork.shapes(max_samples, tiles))
        lists = sum(aligned(rows * columns) for rows, columns in shapes)
        self._buffer = WorkBuffer(4 * max_tokens + 8 * max_samples + lists + 2 * _CHANGES + _SLACK, device)
        take = self._buffer.take
        (self._ids, self._ids_), (self._source, self._source_) = take(max_tokens), take(max_tokens)
        (self._positions, self._positions_), (self._rows, self._rows_) = take(max_tokens), take(max_tokens)
        (self._sample_tokens, self._sample_tokens_) = take(max_samples)
        (self._sample_rows, self._sample_rows_) = take(max_samples)
        self._draw_host, self._draw = zip(*(take(max_samples) for _ in range(4)), strict=True)
        self._uniform, self._uniform_ = take(max_samples * 2)
        (self._places, self._places_), (self._entries, self._entries_) = take(_CHANGES), take(_CHANGES)
        self._decode = DecodeWork(max_samples, items, decode_tile, device, buffer=self._buffer)
        self._prefill = PrefillWork(max_samples, tiles, self._tile_tokens, device, buffer=self._buffer)
        self._partial = torch.zeros((items, spec.num_heads, spec.head_dim), dtype=torch.float32, device=device)
        self._partial_lse = torch.zeros((items, spec.num_heads), dtype=torch.float32, device=device)
        self._views: dict[StepShape, StepInputs] = {}

    def inputs(self, shape: StepShape) -> StepInputs:
        """The device's side as a step of this shape sees it; the same tensors for every call with a bucket."""
        if shape in self._views:
            return self._views[shape]
        tokens, samples = shape.tokens, shape.samples
        requests = max(shape.decodes, 1)
        items = self._decode_items(requests)
        tiles = configs.prefill_items(tokens, samples, self._tile_tokens)
        views = StepInputs(
            shape, self._ids_[:tokens], self._source_[:tokens], self._positions_[:tokens], self._rows_[:tokens],
            self._sample_tokens_[:samples], self._sample_rows_[:samples], self._decode.head(requests, items),
            self._prefill.head(samples, tiles), self._partial[:items], self._partial_lse[:items],
        )  # fmt: skip
        if not shape.exact:
            self._views[shape] = views
        return views

    def fill(self, shape: StepShape, layout: Layout, rows: RowTable) -> StepInputs:
        """Write a step, its decodes first, padded to `shape`, on the host's side; `upload` sends it."""
        views, (row, start, length, _) = self.inputs(shape), layout.chunks.T
        _pad(self._ids, rows.tokens[layout.token_rows, layout.positions], shape.tokens, 0)
        _pad(self._source, layout.token_rows, shape.tokens, rows.num_rows)
        _pad(self._positions, layout.positions, shape.tokens, 0)
        _pad(self._rows, layout.token_rows, shape.tokens, -1)
        _pad(self._sample_tokens, layout.sampled_tokens, shape.samples, 0)
        _pad(self._sample_rows, layout.sampled_rows, shape.samples, rows.num_rows)
        count = layout.num_decodes
        views.decode.fill(row[:count].astype(np.int32), (start[:count] + 1).astype(np.int32))
        if shape.prefill:
            chunks = np.stack((row, layout.firsts, length, start), axis=1)[count:]
            views.prefill.fill(chunks.astype(np.int32))
        return views

    def fill_draw(self, layout: Layout, rows: RowTable) -> DrawInputs:
        """Write the sampling parameters of a step's samples."""
        table, where, count = rows.sampling, layout.sampled_rows, len(layout.sampled)
        temperature, top_k, top_p, min_p = self._draw_host
        top_k[:count] = table.top_k[where]
        columns = ((temperature, table.temperature), (top_p, table.top_p), (min_p, table.min_p))
        for target, values in columns:
            target.view(np.float32)[:count] = values[where]
        positions = layout.positions[layout.sampled_tokens] + 1 - rows.num_prompt[where]
        self._uniform.view(np.float64)[:count] = uniforms(table.seed[where], positions)
        device = [part[:count] for part in self._draw]
        floats = [device[place].view(torch.float32) for place in (0, 2, 3)]
        return DrawInputs(
            self._uniform_.view(torch.float64)[:count], floats[0], device[1], floats[1], floats[2],
            int(table.top_k[where].max()), bool((table.top_p[where] < 1).any()), bool((table.min_p[where] > 0).any()),
        )  # fmt: skip

    def fill_changes(self, places: Int32Array, entries: Int32Array) -> None:
        """Write changes of the block tables, as many as there is room for; `write_tables` sends the rest."""
        count = min(len(places), _CHANGES)
        self._places[:count], self._entries[:count] = places[:count], entries[:count]

    def upload(self) -> None:
        """Start the one copy of a step. What `fill*` wrote may be overwritten at once."""
        self._buffer.upload()

    def write_tables(self, tables: Tensor, places: Int32Array, entries: Int32Array) -> None:
        """Apply the changes on the device, behind `upload`."""
        count, flat = min(len(places), _CHANGES), tables.view(-1)
        if count:
            flat.index_copy_(0, self._places_[:count].long(), self._entries_[:count])
        for first in range(_CHANGES, len(places), _CHANGES):
            part = slice(first, first + _CHANGES)
            ids, values = (send(values[part], tables.device) for values in (places, entries))
            flat.index_copy_(0, ids.long(), values)


def _pad(target: Int32Array, values: IntArray | Int32Array, size: int, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) : size] = padding


def send(values: Int32Array, device: torch.device) -> Tensor:
    """A copy on the device. The allocator of pinned memory keeps the host's side until it has been read."""
    host = torch.from_numpy(values.copy())
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
