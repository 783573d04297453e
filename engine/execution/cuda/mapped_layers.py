"""Layers whose memory can be lent to the pool and returned (KunServe §4.1).

Each layer has a piece of memory and its own addresses for it. Releasing a layer maps its piece after the pool's memory;
restoring it maps the piece back. The layer then has its old addresses, so CUDA graphs that read it stay valid, and no
other allocation can take the memory in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.execution.cuda.virtual_memory import MappingError, Memory, Piece, Range
from engine.models.weights import LayerWeights, ResidentLayers, matrices
from engine.triton_kernels import configs

_ALIGNMENT = 512  # bytes, like torch's allocator; kernels may be selected by alignment


class MappedLayers(ResidentLayers):
    """A LayerSource, and from `reserve` on the PoolMemory of one pool. Raises ConfigError if there is no memory.

    Work in flight on the device must not touch layers that are released or restored.
    """

    def __init__(self, memory: Memory, layers: Iterator[LayerWeights]) -> None:
        super().__init__()
        self._memory = memory
        self._pieces: list[Piece] = []
        self._homes: list[Range] = []
        try:
            self.extend(map(self._move_in, layers))
        except MappingError as error:
            raise ConfigError(f"no memory for the weights of layer {len(self)}: {error.message}") from None
        self._whole = list(self)
        self._pool: Range | None = None
        self.tensor: Tensor

    @property
    def spare_bytes(self) -> int:
        """See ResidentLayers."""
        return sum(piece.num_bytes for piece in self._pieces)

    def reserve(self, num_bytes: int, spare_bytes: int) -> "MappedLayers":
        """See Reserve."""
        assert self._pool is None, "layers can lend memory to one pool only"
        try:
            piece = self._memory.create(num_bytes)
            self._pool = self._memory.reserve(piece.num_bytes + spare_bytes)
            self._pool.push([piece])
        except MappingError as error:
            raise ConfigError(f"no memory for a cache of {num_bytes / 2**30:.2f} GiB: {error.message}") from None
        self.tensor = self._pool.tensor
        self.tensor[:num_bytes].zero_()
        return self

    def give_up(self, indices: Sequence[int], needed: int) -> None:
        """See ResidentLayers. Raises MappingError, without changes except pieces that stay unmapped until the next
        `give_back`."""
        assert self._pool is not None
        absent = {*self.absent, *indices}
        lent = [index for index in sorted(absent) if self._pieces[index].range is not self._pool]
        pieces = [self._pieces[index] for index in lent]
        if (room := self._pool.backed + sum(piece.num_bytes for piece in pieces)) < needed:
            raise ValueError(f"the pool needs {needed} bytes but can have only {room}")
        self._rest()
        try:
            for index in lent:
                if self._pieces[index].range is not None:
                    self._homes[index].pop()
            self._pool.push(pieces)
        except MappingError:
            self._go_home()
            raise
        super().give_up(indices, needed)

    def back(self, num_bytes: int) -> None:
        """See PoolMemory."""
        assert self._pool is not None
        if self._pool.backed < num_bytes:
            raise ValueError(f"the pool needs {num_bytes} bytes but has only {self._pool.backed}")

    def give_back(self, num_bytes: int) -> None:
        """See PoolMemory. Raises MappingError; the next call completes the remaining work."""
        assert self._pool is not None
        pool = self._pool
        self._rest()
        while len(pool.pieces) > 1 and pool.backed - pool.pieces[-1].num_bytes >= num_bytes:
            pool.pop()
        self._go_home()

    def refill(self, index: int, loaded: LayerWeights) -> LayerWeights:
        """See ResidentLayers; copies the loaded weights to the original addresses of the layer."""
        if self._pieces[index].range is not self._homes[index]:
            raise ValueError(f"the memory of layer {index} is still in use by the pool")
        for mine, theirs in zip(matrices(self._whole[index]), matrices(loaded), strict=True):
            mine.data().copy_(theirs.data())
        self._rest()  # steps run in another stream
        return self._whole[index]

    def _move_in(self, layer: LayerWeights) -> LayerWeights:
        """Move the layer to its own piece of memory."""
        data = [matrix.data() for matrix in matrices(layer)]
        at = [0]
        for part in data:
            at.append(at[-1] + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT)
        piece = self._memory.create(at[-1])
        home = self._memory.reserve(piece.num_bytes)
        home.push([piece])
        buffer, moved = home.tensor, []
        for first, part, matrix in zip(at, data, matrices(layer), strict=False):
            moved.append(matrix.on(buffer[first : first + part.nbytes].copy_(part)))
        self._pieces.append(piece)
        self._homes.append(home)
        qkv, out, up, down = moved
        return replace(layer, qkv=qkv, out=out, up=up, down=down)

    def _go_home(self) -> None:
        for piece, home in zip(self._pieces, self._homes, strict=True):
            if piece.range is None:
                home.push([piece])

    def _rest(self) -> None:
        """Wait until all launched work has ended."""
        if configs.is_cuda(self._memory.device):
            torch.cuda.synchronize(self._memory.device)
