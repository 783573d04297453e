"""Layers whose matrices lie in memory that the pool can have, and give back (KunServe §4.1).

Each layer has a piece of memory and addresses of its own for it. To give a layer up puts its piece behind the pool's;
to have it back puts it where it was. So a layer has the same addresses again, with all that stands beside its matrices:
CUDA graphs that read them stay good, and no memory changes hands that anybody else could take. Knows nothing of units.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.execution.cuda.virtual_memory import MappingError, Memory, Piece, Range
from engine.models.weights import LayerWeights, ResidentLayers, matrices
from engine.triton_kernels import configs

_ALIGNMENT = 512  # bytes, as torch's own allocator has it: kernels may be chosen by it


class MappedLayers(ResidentLayers):
    """See LayerSource. Also the PoolMemory of one pool, from `reserve` on. Raises ConfigError where there is no room.

    What is in flight on the device must not touch layers that come or go.
    """

    def __init__(self, memory: Memory, layers: Iterator[LayerWeights]) -> None:
        super().__init__()
        self._memory = memory
        self._pieces: list[Piece] = []
        self._homes: list[Range] = []
        try:
            self.extend(map(self._move_in, layers))
        except MappingError as error:
            raise ConfigError(f"no room for the weights of layer {len(self)}: {error.message}") from None
        self._whole = list(self)
        self._pool: Range | None = None
        self.tensor: Tensor

    @property
    def spare_bytes(self) -> int:
        """See ResidentLayers."""
        return sum(piece.num_bytes for piece in self._pieces)

    def reserve(self, num_bytes: int, spare_bytes: int) -> "MappedLayers":
        """See Reserve."""
        assert self._pool is None, "layers are of one pool"
        try:
            piece = self._memory.create(num_bytes)
            self._pool = self._memory.reserve(piece.num_bytes + spare_bytes)
            self._pool.push([piece])
        except MappingError as error:
            raise ConfigError(f"no room for a cache of {num_bytes / 2**30:.2f} GiB: {error.message}") from None
        self.tensor = self._pool.tensor
        self.tensor[:num_bytes].zero_()
        return self

    def give_up(self, indices: Sequence[int], needed: int) -> None:
        """See ResidentLayers. Raises MappingError, with nothing changed but memory that is nowhere until the next
        `give_back`."""
        assert self._pool is not None
        absent = {*self.absent, *indices}
        lent = [index for index in sorted(absent) if self._pieces[index].range is not self._pool]
        pieces = [self._pieces[index] for index in lent]
        if (room := self._pool.backed + sum(piece.num_bytes for piece in pieces)) < needed:
            raise ValueError(f"there is no room for {needed} bytes of units, only for {room}")
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
            raise ValueError(f"there is no room for {num_bytes} bytes of units, only for {self._pool.backed}")

    def give_back(self, num_bytes: int) -> None:
        """See PoolMemory. Raises MappingError; what it has not done the next call does."""
        assert self._pool is not None
        pool = self._pool
        self._rest()
        while len(pool.pieces) > 1 and pool.backed - pool.pieces[-1].num_bytes >= num_bytes:
            pool.pop()
        self._go_home()

    def refill(self, index: int, loaded: LayerWeights) -> LayerWeights:
        """See ResidentLayers: what was loaded is copied to where the layer was made."""
        if self._pieces[index].range is not self._homes[index]:
            raise ValueError(f"the memory of layer {index} is the pool's")
        for mine, theirs in zip(matrices(self._whole[index]), matrices(loaded), strict=True):
            mine.data().copy_(theirs.data())
        self._rest()  # steps run in another stream
        return self._whole[index]

    def _move_in(self, layer: LayerWeights) -> LayerWeights:
        """The layer in a piece of its own."""
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
        """What was launched has ended."""
        if configs.is_cuda(self._memory.device):
            torch.cuda.synchronize(self._memory.device)
