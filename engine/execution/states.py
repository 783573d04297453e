"""What recurrent layers keep of each request: one item of fixed size, in the request's row.

A chunk from a request's first token on begins from nothing, so a row needs no clearing between requests, and a step
that failed half-way leaves nothing behind: its requests start over. Decodes of a step run stacked, longer chunks one by
one, and some layers take a chunk that goes on token by token (`LayerState`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.layout import Layout
from engine.models.recurrent import Call, LayerState, Past, Recur


class StateTable:
    """`layers`: the states of one request in each recurrent layer, whose sizes and types are taken; the table has
    `num_rows` of each, zero at first."""

    def __init__(self, layers: Mapping[int, LayerState], num_rows: int) -> None:
        self._layers = {
            layer: {part: state.new_zeros(num_rows, *state.shape[1:]) for part, state in found.parts.items()}
            for layer, found in layers.items()
        }
        self._resumes = {layer: found.resumes for layer, found in layers.items()}

    @property
    def num_bytes(self) -> int:
        return sum(table.nbytes for tables in self._layers.values() for table in tables.values())

    def of_step(self, layout: Layout, device: torch.device) -> Recur:
        """How the recurrent layers of a step run."""
        rows, starts, lengths = layout.rows, layout.starts, layout.lengths
        decodes = (lengths == 1) & (starts > 0)
        stacked = [torch.from_numpy(each[decodes]).to(device) for each in (rows, layout.firsts)]
        others: IntArray = layout.chunks[~decodes]
        chunks = list(zip(others[:, :3].tolist(), layout.firsts[~decodes].tolist(), strict=True))

        def recur(layer: int, call: Call, x: Tensor) -> Tensor:
            tables, output = self._layers[layer], torch.empty_like(x)
            if len(stacked[0]):
                where, places = stacked
                past = Past({part: table.index_select(0, where) for part, table in tables.items()})
                output[0].index_copy_(0, places, call(x[0].index_select(0, places)[:, None], past)[:, 0])
                for part, table in tables.items():
                    table.index_copy_(0, where, past.parts[part].to(table.dtype))
            for (row, start, length), first in chunks:
                past = Past({part: table[row : row + 1] for part, table in tables.items()} if start else None)
                at_once = length if self._resumes[layer] or not start else 1
                for place in range(first, first + length, at_once):
                    output[:, place : place + at_once] = call(x[:, place : place + at_once], past)
                for part, table in tables.items():
                    table[row : row + 1].copy_(past.parts[part])
            return output

        return recur
