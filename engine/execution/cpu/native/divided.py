"""A tape for one rank's part of the layers: it runs in segments, and all ranks add their results between them.

All ranks run the same chunks, so that a row belongs to the same token on each.
"""

from dataclasses import dataclass

from torch import Tensor

from engine.execution.cpu.native.library import Library, Tape, TapeShape, TapeStep, Team
from engine.execution.cpu.native.tape import Buffers, Composed
from engine.execution.cpu.native.weights import NativeWeights, RankSum


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum over ranks of `rows [n, stride]` before operation `end`; `sampled`: of sampled tokens only."""

    end: int
    rows: Tensor
    sampled: bool
    ranks: RankSum


class DividedTape(Tape):
    """A tape with sums over ranks between its operations. `sampled`: see `compose`."""

    def __init__(
        self,
        library: Library,
        shape: TapeShape,
        composed: Composed,
        weights: NativeWeights,
        buffers: Buffers,
        sampled: Buffers | None,
    ) -> None:
        super().__init__(library, shape, composed.ops)
        self._sums: list[_Sum] = []
        self._after_layers, self._after_all = composed.layers[-1].stop, len(composed.ops)
        for place, layer in enumerate(weights.layers.values()):
            _, out, _, down = composed.linear_ops(place)
            for op, ranks in ((out, layer.out_sum), (down, layer.down_sum)):
                if ranks is None:
                    continue
                alone = bool(composed.ops[op].sampled)
                at = sampled if alone and sampled is not None else buffers
                rows = at.delta if op == out or at.other is None else at.other
                self._sums.append(_Sum(op + 1, rows, alone, ranks))

    def run_part(self, team: Team, step: TapeStep, tokens: int, samples: int, *, head: bool) -> None:
        """Run this rank's part of a step with `tokens` tokens and `samples` samples, and the `head` if requested.

        Raises StepError, and RuntimeError if a rank has ended.
        """
        self.begin(team, step)
        done = 0
        for each in self._sums:
            self.run_ops(team, done, each.end)
            done = each.end
            if count := samples if each.sampled else tokens:
                each.ranks.add(each.rows[:count])
        self.run_ops(team, done, self._after_all if head else self._after_layers)
