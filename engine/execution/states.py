"""States of recurrent layers: one item of fixed size per request, in its row, and copies in slots on the device and the
host.

A chunk from a request's first token starts without a state, and one after a prefix from the state in a slot. Rows
therefore need no clearing between requests, and a failed step leaves nothing behind: its requests start over. Decodes
run stacked, longer chunks one by one; some layers continue a chunk token by token (`LayerState`). A chunk in which a
state is saved is cut there, in these layers only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.host_memory import host_zeros
from engine.execution.layout import Layout
from engine.execution.rows import StateMoves
from engine.models.recurrent import Call, LayerState, Part, Recur, RecurrentState

_NO_MOVES = StateMoves()
_Saves = Mapping[tuple[int, int], int]
"""(row, number of tokens) -> place of the saved state."""


class _Run(NamedTuple):
    """Tokens of one request that a layer runs at once, from token `first` of the step.

    The final state is also copied to place `kept` of the table if that is not negative.
    """

    row: int
    begins: bool
    first: int
    length: int
    kept: int


class StateTable:
    """States of all rows and slots.

    `layers` holds the states of one request per recurrent layer, as a template. The table has `num_rows` copies,
    initially zero, followed by `num_slots` slots, and `host_slots` slots on the host.
    """

    def __init__(
        self, layers: Mapping[int, LayerState], num_rows: int, num_slots: int = 0, host_slots: int = 0
    ) -> None:
        count = num_rows + num_slots
        self._layers = {
            layer: {part: state.new_zeros(count, *state.shape[1:]) for part, state in found.parts.items()}
            for layer, found in layers.items()
        }
        self._host = {
            layer: {part: _on_host(state, host_slots) for part, state in found.parts.items()}
            for layer, found in layers.items()
        }
        self._resumes = {layer: found.resumes for layer, found in layers.items()}
        self._num_rows, self._num_slots = num_rows, num_slots

    def of_step(self, layout: Layout, device: torch.device, moves: StateMoves = _NO_MOVES) -> Recur:
        """Return the function that runs the recurrent layers of a step."""
        decodes = (layout.lengths == 1) & (layout.starts > 0)
        where, places = (torch.from_numpy(each[decodes]).to(device) for each in (layout.rows, layout.firsts))
        saves = {(row, num_tokens): self._num_rows + slot for row, num_tokens, slot in moves.saved}
        runs = list(_runs(layout.chunks[~decodes], layout.firsts[~decodes], saves))
        ends = zip(layout.rows[decodes].tolist(), (layout.starts[decodes] + 1).tolist(), strict=True)
        kept = [(end[0], saves[end]) for end in ends if end in saves]
        assert len(kept) + sum(run.kept >= 0 for run in runs) == len(saves), "a saved state must end a chunk or part"
        self._park(moves.parked)
        loads = self._load(moves.loaded, device)
        copies = _places(kept, device)

        def recur(layer: int, call: Call, x: Tensor) -> Tensor:
            tables, output = self._layers[layer], torch.empty_like(x)
            _copy(tables, loads)
            if len(where):
                past = RecurrentState({part: table.index_select(0, where) for part, table in tables.items()})
                output[0].index_copy_(0, places, call(x[0].index_select(0, places)[:, None], past)[:, 0])
                for part, table in tables.items():
                    table.index_copy_(0, where, past.parts[part].to(table.dtype))
                _copy(tables, copies)
            for run in runs:
                self._run(layer, call, x, output, run)
            return output

        return recur

    def _park(self, parked: Sequence[tuple[int, int]]) -> None:
        """Copy slots of the device to slots of the host."""
        for slot, target in parked:
            for layer, tables in self._layers.items():
                for part, table in tables.items():
                    self._host[layer][part][target].copy_(table[self._num_rows + slot], non_blocking=True)

    def _load(self, loaded: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Load states from the host into rows; return the places of the remaining copies on the device."""
        for row, slot in loaded:
            for layer, tables in self._layers.items() if slot >= self._num_slots else ():
                for part, table in tables.items():
                    table[row].copy_(self._host[layer][part][slot - self._num_slots], non_blocking=True)
        return _places([(self._num_rows + slot, row) for row, slot in loaded if slot < self._num_slots], device)

    def _run(self, layer: int, call: Call, x: Tensor, output: Tensor, run: _Run) -> None:
        tables, row = self._layers[layer], slice(run.row, run.row + 1)
        past = RecurrentState(None if run.begins else {part: table[row] for part, table in tables.items()})
        at_once = run.length if self._resumes[layer] or run.begins else 1
        for place in range(run.first, run.first + run.length, at_once):
            output[:, place : place + at_once] = call(x[:, place : place + at_once], past)
        for part, table in tables.items():
            table[row].copy_(past.parts[part])
            if run.kept >= 0:
                table[run.kept].copy_(past.parts[part][0])


def _runs(chunks: IntArray, firsts: IntArray, saves: _Saves) -> Iterator[_Run]:
    """Split chunks [n, 4] with first tokens `firsts` [n] wherever a state is saved."""
    for (row, start, length, _), first in zip(chunks.tolist(), firsts.tolist(), strict=True):
        cuts = sorted(num_tokens for of_row, num_tokens in saves if of_row == row and start < num_tokens)
        begin = start
        for end in sorted({*cuts, start + length}):
            yield _Run(row, begin == 0, first + begin - start, end - begin, saves.get((row, end), -1))
            begin = end


def _on_host(state: Tensor, slots: int) -> Tensor:
    """Return zeros for `slots` copies of a state [1, ...] on the host."""
    size = slots * state[0].numel() * state.element_size()
    return host_zeros(size, state.device).view(state.dtype).view(slots, *state.shape[1:])


def _places(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return [2, n], sources and targets."""
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous().to(device)


def _copy(tables: Mapping[Part, Tensor], places: Tensor) -> None:
    if places.shape[1]:
        source, target = places
        for table in tables.values():
            table.index_copy_(0, target, table.index_select(0, source))
