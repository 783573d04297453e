"""A CUDA device as one stage of a pipeline of engines: a range of layers, without graphs, between two hidden states in
page-locked host memory (KunServe §4).

Steps have the shapes of their buckets, so that they use the same kernels as the graphs of a whole engine.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cuda.buffers import StepInputs, send
from engine.execution.cuda.forward import Forward
from engine.execution.host_memory import pinned
from engine.execution.layout import Layout, decodes_first
from engine.execution.pooling import TakeHidden
from engine.execution.stream import DeviceStream, Mark

if TYPE_CHECKING:
    from engine.execution.stages import NextStage


class Stage:
    """Stage of a `forward` that runs in `stream`.

    `fill` writes a step and sends it to the device. `max_tokens` is the maximum number of tokens of a step.
    """

    def __init__(
        self, forward: Forward, stream: DeviceStream, fill: Callable[[Layout], StepInputs], max_tokens: int
    ) -> None:
        self._forward, self._stream, self._fill = forward, stream, fill
        self._weights, self._max_tokens = forward.decoder.weights, max_tokens
        self._in: Tensor | None = None
        self._out: Tensor | None = None
        self._entered: Mark | None = None

    def lead(self, beyond: "NextStage", chunks: IntArray, take: TakeHidden | None) -> Tensor:
        """Run chunks [n, 4] here and on the following stages; return the sampled hidden state [S, H] on the host.

        All micro-batches are launched before the first result is awaited; each is sent on when it has ended.
        """
        layouts, begun = [], []
        for part in beyond.cut(chunks, whole=take is not None):
            layouts.append(decodes_first(part))
            inputs = self._fill(layouts[-1])
            begun.append(self._forward.through(inputs, self._forward.embed(inputs))[: len(layouts[-1].positions)])
        for layout, hidden in zip(layouts, self._leave(begun), strict=True):
            wanted = layout.sampled_tokens if take is None else np.arange(len(hidden))
            beyond.send(layout.chunks, hidden[None], wanted)
        came = torch.cat([hidden[0] for hidden in beyond.receive()])
        if take is None:
            return came
        decoder = self._forward.decoder
        take(layouts[0], decoder.normed(self.enter(came, len(came))), decoder.head)
        return came[torch.from_numpy(layouts[0].sampled_tokens)]

    def pass_through(self, beyond: "NextStage | None", chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        """Run the next part of a step that another device began, with the data of `NextStage.send`, chunk i in row i.

        Returns the wanted hidden states, on the host.
        """
        layout = decodes_first(chunks)
        inputs, chunk = self._fill(layout), layout.token_rows
        firsts = np.cumsum(chunks[:, 2]) - chunks[:, 2]
        # Reorder tokens for attention, and back.
        came = firsts[chunk] + layout.positions - chunks[chunk, 1]
        x = self._forward.through(inputs, self.enter(hidden[0], inputs.shape.tokens, came))
        back = np.empty_like(came)
        back[came] = np.arange(len(came))
        leaving = back if beyond is not None else back[wanted]
        (left,) = self._leave([x.index_select(0, send(leaving, x.device))])
        if beyond is None:
            return left[None]
        beyond.send(chunks, left[None], wanted)
        return beyond.receive()[0]

    def enter(self, hidden: Tensor, rows: int, order: IntArray | None = None) -> Tensor:
        """Copy hidden state [n, H], reordered by `order [n]`, from the host to the device, padded with zeros to `rows`
        rows."""
        if self._entered is not None:
            self._entered.synchronize()  # the staging memory is free again
        self._in = self._passing() if self._in is None else self._in
        passing = self._in[: len(hidden)]
        if order is None:
            passing.copy_(hidden)
        else:
            torch.index_select(hidden, 0, torch.from_numpy(order), out=passing)
        found = self._weights.embedding.new_zeros((rows, hidden.shape[1]))
        self._stream.copy(passing, found[: len(hidden)])
        self._entered = self._stream.mark()
        return found

    def _leave(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield hidden states [n, H] on the host as they arrive; valid until the next call."""
        self._out = self._passing() if self._out is None else self._out
        at, left = 0, list[tuple[Tensor, Mark]]()
        for part in parts:
            passing = self._out[at : at + len(part)]
            left.append((passing, self._stream.fetch(part, passing)))
            at += len(part)
        for passing, mark in left:
            mark.synchronize()
            yield passing

    def _passing(self) -> Tensor:
        width = self._weights.embedding.shape[1]
        size = self._max_tokens * width
        return pinned(size, self._weights.embedding.dtype, self._weights.embedding.device).view(-1, width)
