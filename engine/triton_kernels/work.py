"""Work lists of the attention kernels: the assignment of programs, computed on the host and read from device memory.

A list has a fixed capacity, so that the grid of a kernel is static and one captured graph serves every batch of its
bucket; unused items end immediately. Lists are numpy arrays, filled in place and uploaded in one copy.
"""

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.triton_kernels import configs
from engine.triton_kernels.configs import MIN_PREFILL_SPLIT, MIN_SPLIT

Int32Array = npt.NDArray[np.int32]

_PINNED_COPIES = 3  # of the host buffer: those of the steps in flight, and one to fill


class Scratch(NamedTuple):
    """Memory of the attention kernels for the results of splits.

    Attributes:
        partial: [items, heads, value_dim] float32.
        lse: [items, heads] float32.
        arrived: [items, kv_heads] int32, zeros; the decode kernel counts splits there and resets it.
    """

    partial: Tensor
    lse: Tensor
    arrived: Tensor


def aligned(size: int) -> int:
    """Return the elements that a part of `size` takes in a `WorkBuffer`: parts start at multiples of 16 bytes."""
    return -(-size // 4) * 4


class WorkBuffer:
    """One int32 allocation of `size` elements on the host and a copy on the device, handed out in parts.

    The host buffer is plain memory and may be changed as soon as `upload` returns. On CUDA the copy to the device
    starts from one of several pinned copies, each reused only after its previous transfer has finished.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=torch.int32)
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        if configs.is_cuda(device):
            for _ in range(_PINNED_COPIES):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._pinned.append((torch.zeros(size, dtype=torch.int32, pin_memory=True), event))
        self._used = 0

    def take(self, *shape: int) -> tuple[Int32Array, Tensor]:
        """Return the next free part, as host array and device tensor."""
        part = slice(self._used, self._used + math.prod(shape))
        self._used += aligned(math.prod(shape))
        assert self._used <= len(self._host), "the buffer is too small for its parts"
        return self._host[part].view(shape).numpy(), self._device[part].view(shape)

    def upload(self, count: int | None = None) -> None:
        """Start the copy of all elements, or of the first `count`, to the device on the current stream."""
        if not self._pinned:
            return
        pinned, copied = self._pinned[0]
        self._pinned.append(self._pinned.pop(0))
        copied.synchronize()  # returns immediately unless the device is _PINNED_COPIES copies behind
        # Copy with numpy: from 32,768 elements on, torch starts a thread per core, and those threads spin for a while.
        pinned.numpy()[:count] = self._host.numpy()[:count]
        self._device[:count].copy_(pinned[:count], non_blocking=True)
        copied.record()


def buffer_for(shapes: Sequence[tuple[int, ...]], device: torch.device) -> WorkBuffer:
    """Return a buffer of exactly the size of parts of the given shapes."""
    return WorkBuffer(sum(aligned(math.prod(shape)) for shape in shapes), device)


class DecodeWork:
    """Splits of the contexts of up to `max_requests` decodes.

    Device tensors: `requests` [max_requests, 2] = (table row, context length with the new token; 0 = padding),
    `ranges` [max_requests, 4] = (first item, number of items, request, 0), `items` [max_items, 4] = (request or -1,
    table row, begin, end), begin and end in tokens. `tile` is the kernel's `block_n`: splits begin at its multiples.
    `most` is `max_requests`, also in a `head`.
    """

    def __init__(
        self,
        max_requests: int,
        max_items: int,
        tile: int,
        device: torch.device,
        min_split: int = MIN_SPLIT,
        buffer: WorkBuffer | None = None,
    ) -> None:
        assert max_items >= max_requests, "every request needs an item"
        self.tile, self.min_split, self.most = tile, min_split, max_requests
        self.buffer = buffer or buffer_for(self.shapes(max_requests, max_items), device)
        parts = [self.buffer.take(*shape) for shape in self.shapes(max_requests, max_items)]
        self._requests, self._ranges, self._items = (array for array, _ in parts)
        self.requests, self.ranges, self.items = (tensor for _, tensor in parts)
        self._items[:, 0] = -1
        self._ranges[:, 2] = np.arange(max_requests)

    @staticmethod
    def shapes(max_requests: int, max_items: int) -> tuple[tuple[int, int], ...]:
        """Return the shapes of the parts of a buffer that a list uses."""
        return ((max_requests, 2), (max_requests, 4), (max_items, 4))

    def head(self, max_requests: int, max_items: int) -> "DecodeWork":
        """Return a smaller list in the same memory; only one such list can be filled at a time."""
        assert max_requests <= max_items <= len(self._items) and max_requests <= len(self._requests)
        part = copy(self)
        part._requests, part.requests = self._requests[:max_requests], self.requests[:max_requests]
        part._ranges, part.ranges = self._ranges[:max_requests], self.ranges[:max_requests]
        part._items, part.items = self._items[:max_items], self.items[:max_items]
        return part

    def fill(self, rows: Int32Array, context_lens: Int32Array) -> None:
        """Plan a batch from the table row and context length of each request, at most `max_requests`.

        Contexts longer than `min_split` are split as evenly as tiles allow, into splits of at least half of it.
        """
        count, capacity = len(rows), len(self._items)
        assert count <= len(self._requests), "more requests than the work list holds"
        self._requests[:count, 0], self._requests[:count, 1] = rows, context_lens
        self._requests[count:] = 0
        # With whole splits of this many tiles, sum(ceil(tiles / size)) <= sum(tiles) / size + count <= capacity.
        tiles = -(-context_lens.astype(np.int64) // self.tile)
        size = max(1, -(-self.min_split // self.tile), -(-int(tiles.sum()) // max(1, capacity - count)))
        splits = -(-tiles // size)
        first = np.cumsum(splits) - splits
        self._ranges[:count, 0], self._ranges[:count, 1] = first, splits
        self._ranges[count:, :2] = 0
        self._write_items(tiles, splits, first, context_lens, rows)

    def _write_items(
        self,
        tiles: npt.NDArray[np.int64],
        splits: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        context_lens: Int32Array,
        rows: Int32Array,
    ) -> None:
        used = int(splits.sum())
        request = np.repeat(np.arange(len(rows)), splits)
        length = (-(-tiles // np.maximum(splits, 1)) * self.tile)[request]
        begin = (np.arange(used) - first[request]) * length
        items = self._items
        items[:used, 0], items[:used, 1], items[:used, 2] = request, rows[request], begin
        items[:used, 3] = np.minimum(begin + length, context_lens[request])
        items[used:, 0] = -1


class PrefillWork:
    """Query tiles of up to `max_chunks` prompt chunks (a decode is a chunk of one token).

    Device tensors:
        chunks: [max_chunks, 4] = (table row, first query token, length, position of the first token); length 0 =
            padding.
        items: [max_items, 8] = (table row, first query token, tokens or 0 if unused, position of the first token, begin
            and end in cached tokens, first row of the partial results, splits of the tile). Split s of a tile writes
            its token t to row (first + t * splits) + s.
        merges: [n, 4] = (first row of the partial results, splits, query token, 0); 1 split if there is nothing to
            merge.

    Args:
        tokens_per_tile: block_m // group.
        slots: Number of tiles that run concurrently (`configs.prefill_slots`); 0: no splits. `max_items` must include
            as many items for splits.
        tile: `block_n` of the kernel; splits begin at its multiples.
        min_split: Minimum number of cached tokens of a split.
    """

    def __init__(
        self,
        max_chunks: int,
        max_items: int,
        tokens_per_tile: int,
        device: torch.device,
        buffer: WorkBuffer | None = None,
        *,
        slots: int = 0,
        tile: int = 0,
        min_split: int = MIN_PREFILL_SPLIT,
    ) -> None:
        assert slots == 0 or tile > 0, "splits need the tile of the kernel"
        self.tokens_per_tile, self.slots, self.tile, self.min_split = tokens_per_tile, slots, tile, min_split
        self.fixed = False
        shapes = self.shapes(max_chunks, max_items, configs.prefill_merged(slots, tokens_per_tile))
        self.buffer = buffer or buffer_for(shapes, device)
        parts = [self.buffer.take(*shape) for shape in shapes]
        self._chunks, self._items, self._merges = (array for array, _ in parts)
        self.chunks, self.items, self.merges = (tensor for _, tensor in parts)
        self._merges[:, 1] = 1
        self._merged, self._padding = 0, True

    @staticmethod
    def shapes(max_chunks: int, max_items: int, max_merged: int) -> tuple[tuple[int, int], ...]:
        """Return the shapes of the parts of a buffer that a list uses."""
        return ((max_chunks, 4), (max_items, 8), (max_merged, 4))

    @property
    def partials(self) -> int:
        """Number of rows of partial results."""
        return configs.prefill_partials(self.slots, self.tokens_per_tile)

    @property
    def merging(self) -> bool:
        """Whether to launch the merge: in a bucket always, because one graph serves steps with and without splits, and
        in a padding step, to compile it."""
        return len(self.merges) > 0 and (self.fixed or self._padding or self._merged > 0)

    def head(self, max_chunks: int, max_items: int, max_tokens: int, fixed: bool) -> "PrefillWork":
        """Return a smaller list of `max_tokens` in the same memory; only one such list can be filled at a time.

        `fixed`: the list belongs to a bucket.
        """
        assert max_items <= len(self._items) and max_chunks <= len(self._chunks)
        part = copy(self)
        part.fixed = fixed
        part._chunks, part.chunks = self._chunks[:max_chunks], self.chunks[:max_chunks]
        part._items, part.items = self._items[:max_items], self.items[:max_items]
        part._merges, part.merges = self._merges[:max_tokens], self.merges[:max_tokens]
        return part

    def fill(self, chunks: Int32Array) -> None:
        """Plan a batch; `chunks` [n, 4] as above. Long items come first, so that short ones fill the end.

        If few query tiles face long contexts, these are split so that the longest item is about as long as the total
        spread over the device. With half of the slots occupied, nothing is split.
        """
        count, size = len(chunks), self.tokens_per_tile
        self._chunks[:count], self._chunks[count:] = chunks, 0
        tiles = -(-chunks[:, 2] // size)
        used = int(tiles.sum())
        assert used <= len(self._items) - self.slots, "more query tiles than the work list holds"
        chunk = np.repeat(np.arange(count), tiles)
        skipped = (np.arange(used) - (np.cumsum(tiles) - tiles)[chunk]) * size
        items = np.zeros((used, 8), np.int32)
        items[:, 0], items[:, 1] = chunks[chunk, 0], chunks[chunk, 1] + skipped
        items[:, 2] = np.minimum(chunks[chunk, 2] - skipped, size)
        items[:, 3] = chunks[chunk, 3] + skipped
        items[:, 5] = items[:, 3] + items[:, 2]
        items[:, 7] = 1
        order = items[:, 3]
        self._merged, self._padding = 0, not used
        if used and self.slots and int(items[:, 5].max()) >= 4 * self.min_split:
            items = self._split(items)
            order = np.where(items[:, 7] > 1, items[:, 5] - items[:, 4], items[:, 3])
        self._merges[self._merged :, 1] = 1
        used = len(items)
        self._items[:used] = items[np.argsort(-order, kind="stable")]
        self._items[used:] = 0

    def _split(self, items: Int32Array) -> Int32Array:
        """Split the longest tiles of `items [n, 8]`, at most n + slots items in total; write `merges`."""
        lengths = -(-items[:, 5] // self.tile)  # in tiles of cached tokens
        # sum(ceil(length / share)) <= sum(lengths) / share + n <= slots + n, and fewer than `slots` tiles are split
        share = max(-(-int(lengths.sum()) // self.slots), -(-self.min_split // self.tile))
        splits = -(-lengths // share)
        splits[items[:, 5] < 4 * self.min_split] = 1
        several = splits > 1
        if not several.any() or int(items[several, 2].sum()) > len(self._merges):
            return items
        rows = np.where(several, items[:, 2] * splits, 0)
        items[:, 6], items[:, 7] = np.cumsum(rows) - rows, splits
        self._write_merges(items[several])
        source = np.repeat(np.arange(len(items)), splits)
        number = np.arange(len(source)) - (np.cumsum(splits) - splits)[source]
        length = (-(-lengths // splits) * self.tile)[source]
        parts = items[source]
        parts[:, 4] = number * length
        parts[:, 5] = np.minimum(parts[:, 4] + length, parts[:, 5])
        parts[:, 6] += np.where(parts[:, 7] > 1, number, 0)
        return parts

    def _write_merges(self, items: Int32Array) -> None:
        source = np.repeat(np.arange(len(items)), items[:, 2])
        token = np.arange(len(source)) - (np.cumsum(items[:, 2]) - items[:, 2])[source]
        first, splits = items[source, 6], items[source, 7]
        self._merged = len(source)
        merges = self._merges[: self._merged]
        merges[:, 0], merges[:, 1], merges[:, 2] = first + token * splits, splits, items[source, 1] + token
