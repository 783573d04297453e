"""Step inputs on the device: one persistent buffer, filled in place on the host and uploaded in one copy.

Every bucket reads the first part of the same tensors. Their addresses never change, so a captured graph finds the data
of each step in the same place.

Steps are padded to a few sizes, so that one CUDA graph serves every step of its bucket (`PaddedShape`).
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.arrays import Float32Array, Int32Array, IntArray
from engine.execution.rows import UNKNOWN, Layout, RowTable, SamplingTable, uniforms
from engine.execution.sampler import DeviceSamples
from engine.limits import Limits
from engine.models.attention import HeadSizes
from engine.triton_kernels import configs
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch, WorkBuffer, aligned

GRAPH_TOKENS = 2048
"""Maximum number of tokens of a step with a graph; kernels of larger steps are long enough to hide their launches."""

_GRAPH_BYTES = 16 * 1024**2
"""Estimate of the driver's memory for a graph of a few hundred kernels."""


@dataclass(frozen=True, slots=True, order=True)
class PaddedShape:
    """Shape of a step.

    Attributes:
        tokens: Number of tokens, including padding.
        decodes: Number of leading tokens that the decode kernel handles.
        prefill: Whether there may be longer chunks.
        samples: Maximum number of sampled tokens.
        exact: Made for a single step instead of a bucket.
    """

    tokens: int
    decodes: int
    prefill: bool
    samples: int
    exact: bool = False

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel, `begin_step`, writes positions and work list: in the buckets of decodes."""
        return not self.prefill and not self.exact


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Return the padded numbers of decodes, about an eighth apart for large batches, up to `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, max(max_num_seqs, 320) + 1, 64)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_buckets(max_num_batched_tokens: int) -> list[int]:
    """Return the padded numbers of tokens of steps with prefill chunks, up to `GRAPH_TOKENS`."""
    sizes = [16, 32, *range(64, 641, 64), *range(768, 1025, 128), *range(1280, GRAPH_TOKENS + 1, 256)]
    limit = min(max_num_batched_tokens, GRAPH_TOKENS)
    return [size for size in sizes if size < limit] + [limit]


def graph_bytes(num_shapes: int, step_bytes: int, max_tokens: int) -> int:
    """Return the memory of the graphs: `step_bytes` of the largest step, scaled to the largest graph, shared by all."""
    largest = min(max_tokens, GRAPH_TOKENS)
    return num_shapes * _GRAPH_BYTES + -(-step_bytes * largest // max_tokens)


class Buckets:
    """Step shapes of an engine with at most `max_num_seqs` requests and `max_num_batched_tokens` tokens per step."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._decode = decode_buckets(max_num_seqs)
        self._mixed = mixed_buckets(max_num_batched_tokens)

    def all_shapes(self) -> list[PaddedShape]:
        """Return all buckets, the largest first, so that later graphs fit into the memory of earlier ones."""
        decode = [PaddedShape(size, size, False, size) for size in self._decode]
        return sorted([*decode, *map(self._mixed_shape, self._mixed)], reverse=True)

    def fit(self, num_tokens: int, num_decodes: int) -> PaddedShape:
        """Return the smallest shape that holds a step; beyond the buckets, a shape of its exact size."""
        if num_tokens == num_decodes:
            size = self._decode[bisect_left(self._decode, num_tokens)]
            return PaddedShape(size, size, False, size)
        if num_tokens <= self._mixed[-1]:
            return self._mixed_shape(self._mixed[bisect_left(self._mixed, num_tokens)])
        return self.exact(num_tokens, num_decodes)

    def exact(self, num_tokens: int, num_decodes: int) -> PaddedShape:
        """Return a shape without padded tokens."""
        return PaddedShape(num_tokens, num_decodes, True, min(num_tokens, self.max_num_seqs), exact=True)

    def _mixed_shape(self, size: int) -> PaddedShape:
        # A prompt chunk has at least two tokens, so the number of decodes is below `size`.
        capacity = min(size, self.max_num_seqs)
        return PaddedShape(size, capacity, True, capacity)


_HEADER = 4  # numbers of steps since `fill`, of changes, of decodes, and of draws
_CHANGES = 4096  # table entries in the buffer; the rest is sent separately
_EDITS = 4096  # biases and forbidden end tokens in the buffer; the rest is sent separately
_SLACK = 256  # upper bound of padding between parts


@dataclass(frozen=True, slots=True)
class StepInputs:
    """View of the device buffer for a shape with T tokens and S samples.

    Attributes:
        ids: [T], negative for the token sampled last for row `source [T]`.
        positions: [T].
        angles: [T], positions in the table of angles; `positions` itself if the model has one set of frequencies.
        rows: [T], -1 for padding and for tokens whose K and V are not stored.
        sample_tokens: [S], which of the T tokens are sampled.
        sample_rows: [S], their rows.
        decode, prefill: Work lists.
        decode_scratch: Scratch of the decode kernel.
        prefill_scratch: The same memory as scratch of the subsequent prefill kernel.
        slots: [T], slots of LoRA adapters, for steps of decodes only.
        stored: [T], rows of tokens stored as hidden state, -1 for others.
        control: [4 + 2 * changes], and
        base: [S, 8], parameters of `Kernels.begin_step`.
        uniform: [S] float64, random numbers of the samples.
    """

    shape: PaddedShape
    ids: Tensor
    source: Tensor
    positions: Tensor
    angles: Tensor
    rows: Tensor
    sample_tokens: Tensor
    sample_rows: Tensor
    decode: DecodeWork
    prefill: PrefillWork
    decode_scratch: Scratch
    prefill_scratch: Scratch
    slots: Tensor
    stored: Tensor
    control: Tensor
    base: Tensor
    uniform: Tensor


class DrawInputs(NamedTuple):
    """Sampling parameters of S rows on the device for `Kernels.draw`, neutral where a parameter is not used.

    `temperature` is 0 for greedy rows.
    """

    uniform: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyInputs:
    """Penalties for `Kernels.penalise`: samples `places [n]` of `rows [n]` with `values [n, 3]`, on the device.

    `host_rows`, `host_ends [n]`: the rows and the sampled positions.
    """

    places: Tensor
    rows: Tensor
    values: Tensor
    host_rows: IntArray
    host_ends: IntArray


@dataclass(frozen=True, slots=True)
class LogprobInputs:
    """Samples `places [w]` (device; also `host_places`) with log-probabilities of the `counts [w]` best tokens."""

    places: Tensor
    host_places: IntArray
    counts: IntArray


@dataclass(frozen=True, slots=True)
class StepWishes:
    """Parameters of a step's samples beyond greedy decoding; None or empty if unused.

    `edits` are pairs of flat indices into logits [S, vocab] and values to add.
    """

    draws: DrawInputs | None = None
    edits: tuple[tuple[Tensor, Tensor], ...] = ()
    penalties: PenaltyInputs | None = None
    logprobs: LogprobInputs | None = None


@dataclass(slots=True)
class RepeatedStep:
    """A step of decodes that the next steps may repeat, each one position later, from what is on the device.

    Attributes:
        count: Number of samples.
        chunks: [n, 4], chunks of the next step; `rows [n]`: their rows.
        version: `RowTable.version`.
        fills: `StepBuffers.fills`.
        result: Result of every repetition, which is always in the same place, if no other kernel follows the step.
        steps: Number of repetitions so far.
    """

    inputs: StepInputs
    wishes: StepWishes
    count: int
    chunks: IntArray
    rows: IntArray
    version: int
    fills: int
    result: tuple[Tensor, DeviceSamples] | None = None
    steps: int = 0

    def repeats(self, chunks: IntArray, rows: RowTable, fills: int) -> bool:
        """Count one more repetition and return True, if `chunks` decode the last samples of the same rows.

        The samples must be unknown to the host, because their values are taken from the device.
        """
        if rows.version != self.version or fills != self.fills or not np.array_equal(chunks, self.chunks):
            return False
        if (rows.tokens[self.rows, chunks[:, 1]] != UNKNOWN).any():
            return False
        self.chunks[:, 1] += 1
        self.steps += 1
        return True


class StepBuffers:
    """Buffers of steps. All layers with these `heads` and all step shapes share the scratch of attention.

    `long_from`: place of position 0 of the long factors in the table of angles; 0: there is one set.

    Attributes:
        max_items: Maximum number of decode work items.
        fills: Number of calls of `fill`.
    """

    def __init__(
        self, heads: HeadSizes, limits: Limits, dtype: torch.dtype, device: torch.device, long_from: int = 0
    ) -> None:
        max_tokens, max_samples = limits.max_num_batched_tokens, limits.max_num_seqs
        arch, group = configs.device_arch(device), heads.heads // heads.kv_heads
        prefill = configs.prefill_config(arch, heads.widest, dtype)
        self._tile_tokens = prefill.block_m // group
        decode_tile = configs.decode_config(arch, heads.widest, group, dtype).block_n
        processors = configs.num_multiprocessors(device)
        self._decode_items = partial(configs.decode_items, num_kv_heads=heads.kv_heads, num_multiprocessors=processors)
        self._slots = configs.prefill_slots(heads.kv_heads, processors)
        items = self._decode_items(max_samples)
        tiles = configs.prefill_items(max_tokens, max_samples, self._tile_tokens, self._slots)
        merged = configs.prefill_merged(self._slots, self._tile_tokens)
        shapes = (*DecodeWork.shapes(max_samples, items), *PrefillWork.shapes(max_samples, tiles, merged))
        lists = sum(aligned(rows * columns) for rows, columns in shapes)
        self._buffer = WorkBuffer(
            6 * max_tokens + 23 * max_samples + lists + 2 * _CHANGES + 2 * _EDITS + _SLACK, device
        )
        take = self._buffer.take
        self._control, self._control_ = take(_HEADER + 2 * _CHANGES)  # first, so that it can be sent alone
        self._changes, self._changes_ = self._control[_HEADER:].reshape(-1, 2), self._control_[_HEADER:].view(-1, 2)
        self._base, self._base_ = take(max_samples, 8)
        self._by_kernel, self.fills = False, 0
        (self._ids, self._ids_), (self._source, self._source_) = take(max_tokens), take(max_tokens)
        (self._positions, self._positions_), (self._rows, self._rows_) = take(max_tokens), take(max_tokens)
        self._long_from = long_from
        self._angles, self._angles_ = take(max_tokens) if long_from else (self._positions, self._positions_)
        (self._sample_tokens, self._sample_tokens_) = take(max_samples)
        (self._sample_rows, self._sample_rows_) = take(max_samples)
        (self._slots_of, self._slots_of_), (self._stored, self._stored_) = take(max_samples), take(max_tokens)
        self._draw_host, self._draw = zip(*(take(max_samples) for _ in range(4)), strict=True)
        self._uniform, self._uniform_ = take(max_samples * 2)
        self._penalised, self._penalised_rows, self._wanted = take(max_samples), take(max_samples), take(max_samples)
        self._penalties, self._edits, self._added = take(max_samples * 3), take(_EDITS), take(_EDITS)
        self._decode = DecodeWork(max_samples, items, decode_tile, device, buffer=self._buffer)
        self._prefill = PrefillWork(
            max_samples, tiles, self._tile_tokens, device, self._buffer, slots=self._slots, tile=prefill.block_n
        )
        scratch = max(items, self._prefill.partials), heads.heads
        self._scratch = Scratch(
            torch.zeros((*scratch, heads.value_dim), dtype=torch.float32, device=device),
            torch.zeros(scratch, dtype=torch.float32, device=device),
            torch.zeros((items, heads.kv_heads), dtype=torch.int32, device=device),
        )
        self._views: dict[PaddedShape, StepInputs] = {}

    def inputs(self, shape: PaddedShape) -> StepInputs:
        """Return the device buffer as seen by a step of this shape; the same tensors for every call with a bucket."""
        if shape in self._views:
            return self._views[shape]
        tokens, samples = shape.tokens, shape.samples
        requests = max(shape.decodes, 1)
        items = self._decode_items(requests)
        tiles = configs.prefill_items(tokens, samples, self._tile_tokens, self._slots)
        decode, prefill = (
            Scratch(*(part[:count] for part in self._scratch)) for count in (items, self._prefill.partials)
        )
        views = StepInputs(
            shape, self._ids_[:tokens], self._source_[:tokens], self._positions_[:tokens],
            self._angles_[:tokens], self._rows_[:tokens],
            self._sample_tokens_[:samples], self._sample_rows_[:samples], self._decode.head(requests, items),
            self._prefill.head(samples, tiles, tokens, not shape.exact), decode, prefill, self._slots_of_[:samples],
            self._stored_[:tokens], self._control_, self._base_[:samples],
            self._uniform_.view(torch.float64)[:samples],
        )  # fmt: skip
        if not shape.exact:
            self._views[shape] = views
        return views

    def fill(self, shape: PaddedShape, layout: Layout, rows: RowTable) -> StepInputs:
        """Write a step (decodes first, padded to `shape`) to the host buffer; `upload` sends it."""
        views, (row, start, length, _) = self.inputs(shape), layout.chunks.T
        count, self._by_kernel = layout.num_decodes, shape.by_kernel
        self.fills += 1
        tokens = rows.tokens[layout.token_rows, layout.positions]
        _pad(self._source, layout.token_rows, shape.tokens, rows.num_rows)
        _pad(self._rows, layout.token_rows, shape.tokens, -1)
        self._stored[: shape.tokens] = -1
        _pad(self._sample_tokens, layout.sampled_tokens, shape.samples, 0)
        _pad(self._sample_rows, layout.sampled_rows, shape.samples, rows.num_rows)
        self._control[:_HEADER] = 0, 0, count, 0
        if shape.by_kernel:
            self._base[:count, :3] = np.stack((tokens, row, start), axis=1)
            self._base[:count, 6] = self._long_from * rows.is_long[row]
            return views
        _pad(self._ids, tokens, shape.tokens, 0)
        _pad(self._positions, layout.positions, shape.tokens, 0)
        if self._long_from:
            _pad(self._angles, layout.positions + self._long_from * rows.is_long[layout.token_rows], shape.tokens, 0)
        views.decode.fill(row[:count].astype(np.int32), (start[:count] + 1).astype(np.int32))
        if shape.prefill:
            chunks = np.stack((row, layout.firsts, length, start), axis=1)[count:]
            views.prefill.fill(chunks.astype(np.int32))
        return views

    def fill_slots(self, shape: PaddedShape, slots: IntArray) -> None:
        """Write the adapter slots of a step of decodes, padded."""
        _pad(self._slots_of, slots, shape.samples, 0)

    def fill_stored(self, stored: IntArray) -> None:
        """Write the rows [T] of new tokens stored as hidden state, -1 for others."""
        self._stored[: len(stored)] = stored

    def fill_wishes(self, where: IntArray, ends: IntArray, rows: RowTable, vocab: int) -> StepWishes:
        """Write the sampling parameters for rows `where [S]` at positions `ends [S]`."""
        table = rows.sampling
        if table.plain(where):
            return StepWishes()
        positions = ends - rows.num_prompt[where]
        drawn, penalised = ~table.greedy[where], np.flatnonzero(table.penalised[where])
        wanted = np.flatnonzero(table.num_logprobs[where] >= 0)
        return StepWishes(
            self._fill_draws(where, positions, table) if drawn.any() else None,
            self._fill_edits(where, positions, table, vocab),
            self._fill_penalties(penalised, where, ends, table) if penalised.size else None,
            LogprobInputs(_part(self._wanted, wanted), wanted, table.num_logprobs[where[wanted]])
            if wanted.size
            else None,
        )

    def _fill_draws(self, where: IntArray, positions: IntArray, table: SamplingTable) -> DrawInputs:
        count = len(where)
        temperature, top_k, top_p, min_p = self._draw_host
        top_k[:count] = table.top_k[where]
        heat = np.where(table.greedy[where], 0.0, table.temperature[where])
        for target, values in ((temperature, heat), (top_p, table.top_p[where]), (min_p, table.min_p[where])):
            target.view(np.float32)[:count] = values
        if self._by_kernel:
            self._base[:count, 3], self._control[3] = positions, count
            self._base.view(np.int64)[:count, 2] = table.seed[where]
        else:
            self._uniform.view(np.float64)[:count] = uniforms(table.seed[where], positions)
        device = [part[:count] for part in self._draw]
        heats, top_ps, min_ps = (device[place].view(torch.float32) for place in (0, 2, 3))
        return DrawInputs(self._uniform_.view(torch.float64)[:count], heats, device[1], top_ps, min_ps)

    def _fill_edits(
        self, where: IntArray, positions: IntArray, table: SamplingTable, vocab: int
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        places, values = [], []
        for place in np.flatnonzero(table.edits[where]).tolist():
            ids, added = table.additions(int(where[place]), int(positions[place]))
            places.append(place * vocab + ids)
            values.append(added)
        if not sum(map(len, places)):
            return ()
        index, added_ = np.concatenate(places).astype(np.int32), np.concatenate(values).astype(np.float32)
        first = min(len(index), _EDITS)
        edits = [
            (_part(self._edits, index[:first]), _part(self._added, added_[:first].view(np.int32)).view(torch.float32))
        ]
        if first < len(index):
            edits.append((send(index[first:], self._ids_.device), send(added_[first:], self._ids_.device)))
        return tuple(edits)

    def _fill_penalties(self, places: IntArray, where: IntArray, ends: IntArray, table: SamplingTable) -> PenaltyInputs:
        rows = where[places]
        values = table.penalties[rows].astype(np.float32).view(np.int32).ravel()
        return PenaltyInputs(
            _part(self._penalised, places), _part(self._penalised_rows, rows),
            _part(self._penalties, values).view(torch.float32).view(-1, 3), rows, ends[places],
        )  # fmt: skip

    def fill_changes(self, places: IntArray, entries: IntArray) -> None:
        """Write block table changes, as many as fit; `write_tables` sends the rest."""
        self._control[1] = count = min(len(places), _CHANGES)
        self._changes[:count, 0], self._changes[:count, 1] = places[:count], entries[:count]

    def repeatable(self, layout: Layout, wishes: StepWishes, inputs: StepInputs, version: int) -> RepeatedStep | None:
        """Return the step filled last if it can be repeated: only decodes, without edits that depend on positions."""
        if not inputs.shape.by_kernel or wishes.edits or wishes.penalties is not None:
            return None
        chunks = layout.chunks + np.array((0, 1, 0, 0))
        return RepeatedStep(inputs, wishes, len(layout.sampled), chunks, chunks[:, 0].copy(), version, self.fills)

    def upload(self, steps: int = 0) -> None:
        """Start the copy of the step, or of what it needs `steps` positions later: table changes.

        The host buffer may be overwritten at once.
        """
        self._control[0] = steps
        self._buffer.upload(_HEADER + 2 * int(self._control[1]) if steps else None)

    def write_tables(self, tables: Tensor, places: IntArray, entries: IntArray) -> None:
        """Apply the block table changes on the device, after `upload`, but those that `begin_step` will apply."""
        count = 0 if self._by_kernel else min(len(places), _CHANGES)
        if not count and len(places) <= _CHANGES:
            return
        flat = tables.view(-1)
        if count:
            changes = self._changes_[:count]
            flat.index_copy_(0, changes[:, 0].long(), changes[:, 1])
        for first in range(_CHANGES, len(places), _CHANGES):
            part = slice(first, first + _CHANGES)
            ids, values = send(places[part], tables.device), send(entries[part].astype(np.int32), tables.device)
            flat.index_copy_(0, ids, values)


def _part(place: tuple[Int32Array, Tensor], values: IntArray | Int32Array) -> Tensor:
    """Write `values [n]` to the host side of a part; return its device side."""
    host, device = place
    host[: len(values)] = values
    return device[: len(values)]


def _pad(target: Int32Array, values: IntArray | Int32Array, size: int, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) : size] = padding


def send(values: Int32Array | IntArray | Float32Array, device: torch.device) -> Tensor:
    """Copy to the device. The pinned allocator keeps the host copy until it has been read."""
    host = torch.from_numpy(values.copy())
    return host.pin_memory().to(device, non_blocking=True) if configs.is_cuda(device) else host
