"""Work lists of the attention kernels: which program does what, decided on the host, read from device memory.

A list has a fixed capacity, so that a kernel's grid is static and one captured graph serves every batch of its bucket;
unused items end at once. Lists are numpy arrays filled in place and uploaded by one copy. Knows nothing of Triton, of
requests or of the pool.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.triton_kernels.configs import MIN_SPLIT

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkBuffer:
    """One int32 allocation on the host (pinned where that exists) and its copy on the device."""

    host: Tensor
    device: Tensor

    def upload(self) -> None:
        """Start the copy on the current stream. `fill` again only after the copy has run: the caller's event."""
        self.device.copy_(self.host, non_blocking=True)


def _allocate(
    shapes: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[WorkBuffer, list[Int32Array], list[Tensor]]:
    """A buffer and its parts as host arrays and device tensors; every part starts at a multiple of 16 bytes."""
    sizes = [-(-rows * columns // 4) * 4 for rows, columns in shapes]
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    buffer = WorkBuffer(host, torch.zeros_like(host, device=device) if device.type != "cpu" else host)
    arrays, tensors, start = [], [], 0
    for (rows, columns), size in zip(shapes, sizes, strict=True):
        part = slice(start, start + rows * columns)
        arrays.append(host[part].view(rows, columns).numpy())
        tensors.append(buffer.device[part].view(rows, columns))
        start += size
    return buffer, arrays, tensors


class DecodeWork:
    """Splits of the contexts of up to `max_requests` decodes.

    Device tensors: `requests` [max_requests, 2] = (table row, context length with the new token; 0 = padding),
    `ranges` [max_requests, 2] = (first item, number of items), `items` [max_items, 4] = (request or -1, table row,
    begin, end), begin and end in tokens. `tile` is the kernel's `block_n`: splits begin at its multiples.
    """

    def __init__(
        self, max_requests: int, max_items: int, tile: int, device: torch.device, min_split: int = MIN_SPLIT
    ) -> None:
        assert max_items >= max_requests, "every request needs an item"
        self.tile, self.min_split = tile, min_split
        shapes = ((max_requests, 2), (max_requests, 2), (max_items, 4))
        self.buffer, arrays, (self.requests, self.ranges, self.items) = _allocate(shapes, device)
        self._requests, self._ranges, self._items = arrays
        self._items[:, 0] = -1

    def fill(self, rows: Int32Array, context_lens: Int32Array) -> None:
        """Plan a batch: table row and context length of each request, fewer than the capacity or as many.

        Contexts longer than `min_split` are split, as evenly as tiles allow and never under half of it.
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
        self._ranges[count:] = 0
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
    """Query tiles of up to `max_chunks` chunks of prompts (a decode is a chunk of one token).

    Device tensors: `chunks` [max_chunks, 4] = (table row, first query token, length, position of the first token),
    length 0 = padding; `items` [max_items, 4] = (table row, first query token, tokens or 0 if unused, position of the
    first token). `tokens_per_tile` = block_m // group.
    """

    def __init__(self, max_chunks: int, max_items: int, tokens_per_tile: int, device: torch.device) -> None:
        self.tokens_per_tile = tokens_per_tile
        self.buffer, arrays, (self.chunks, self.items) = _allocate(((max_chunks, 4), (max_items, 4)), device)
        self._chunks, self._items = arrays

    def fill(self, chunks: Int32Array) -> None:
        """Plan a batch: `chunks` [n, 4] as above. The longest contexts go first, so that short ones fill the end."""
        count, tile = len(chunks), self.tokens_per_tile
        self._chunks[:count], self._chunks[count:] = chunks, 0
        tiles = -(-chunks[:, 2] // tile)
        used = int(tiles.sum())
        assert used <= len(self._items), "more query tiles than the work list holds"
        chunk = np.repeat(np.arange(count), tiles)
        skipped = (np.arange(used) - (np.cumsum(tiles) - tiles)[chunk]) * tile
        position = chunks[chunk, 3] + skipped
        order = np.argsort(-position, kind="stable")
        items = self._items
        items[:used, 0], items[:used, 1] = chunks[chunk, 0][order], (chunks[chunk, 1] + skipped)[order]
        items[:used, 2] = np.minimum(chunks[chunk, 2] - skipped, tile)[order]
        items[:used, 3] = position[order]
        items[used:] = 0
