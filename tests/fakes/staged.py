"""The checking fake runner as a stage of a pipeline: each engine has the cells of its own layers, and a step runs on
both, so that a past which is not there on one of them is found there.
"""

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fakes.runner import FakeRunner, _Cell

from engine.cache.blocks import Tier
from engine.machine.child import Link, LinkLostError
from engine.scheduling.output import Collect, ModelRunnerOutput, SchedulerOutput

LAYERS = 4
LAYER_BYTES, UNIT_LAYER_BYTES = 600, 4
END = b"end"


class StagedFake(FakeRunner):
    """`num_units`: of an engine with all layers."""

    def __init__(self, *, num_units: int, **options: Any) -> None:
        super().__init__(**options)
        self.held = range(LAYERS)
        self.num_units = num_units
        self._coming: dict[int, tuple[list[_Cell | None], set[int]]] = {}
        self._link: Link | None = None
        self._awaited: dict[int, int] = {}
        """Rows whose token a step in flight samples, and that step."""
        self._unanswered: deque[Callable[[], None]] = deque()

    def drop(self, keep: range, num_units: int) -> None:
        assert self._link is None and len(self.held) == LAYERS and 0 < len(keep) < LAYERS
        most = (self.num_units * LAYERS * UNIT_LAYER_BYTES + (LAYERS - len(keep)) * LAYER_BYTES) // (
            len(keep) * UNIT_LAYER_BYTES
        )
        assert num_units <= most, "more units than there is memory for"
        self.held = keep  # units keep their parts of these layers
        self._rows.clear()
        self._coming.clear()

    def prepare_restore(self, num_units: int) -> None:
        assert len(self.held) < LAYERS and num_units * len(self.held) <= self.num_units * LAYERS, "no room for layers"
        for unit in [unit for unit in self._units if unit >= num_units]:
            del self._units[unit]

    def restore(self, num_units: int) -> None:
        assert num_units == self.num_units
        self._link = None
        self._unanswered.clear()
        self._lay_out(range(LAYERS))

    def _lay_out(self, layers: range) -> None:
        self.held = layers
        self._units.clear()
        self._rows.clear()
        self._coming.clear()

    def read_past(self, units: Sequence[int], layers: range) -> bytes:
        assert set(layers) <= set(self.held)
        return pickle.dumps((list(layers), [list(self._unit(Tier.DEVICE, unit)) for unit in units]))

    def write_past(self, units: Sequence[int], layers: range, data: bytes) -> None:
        written, cells = pickle.loads(data)
        assert written == list(layers) and len(cells) == len(units) and set(layers) <= set(self.held)
        for unit, content in zip(units, cells, strict=True):
            known, there = self._coming.setdefault(unit, (list(content), set()))
            assert there.isdisjoint(layers), "layers of a unit are written twice"
            there.update(layers)
            # cells behind the last token are of earlier owners, on each engine another; the next read finds an error
            known[:] = [mine if mine == theirs else None for mine, theirs in zip(known, content, strict=True)]
            if there == set(self.held):
                self._units[unit] = known
                del self._coming[unit]

    def launch(self, output: SchedulerOutput) -> Collect:
        assert self._link is not None or len(self.held) == LAYERS, "half a model computes nothing"
        link = self._link
        return (lambda: self.compute(output)) if link is None else self._lead_step(link, output)

    def compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A step, by this engine's own cells."""
        return super().launch(output)()

    def _lead_step(self, link: Link, output: SchedulerOutput) -> Collect:
        """Both stages compute a step while the next one is launched, which must not need its tokens."""
        for row in (*output.released_rows, *(new.row for new in output.new_requests)):
            self._awaited.pop(row, None)
        assert self._awaited.keys().isdisjoint(chunk.row for chunk in output.chunks), "a step needs a token in flight"
        own = self.compute(output)
        link.send(pickle.dumps(output))
        self._awaited.update((chunk.row, output.step_id) for chunk in output.chunks if chunk.sample)

        def receive() -> None:
            self._unanswered.popleft()
            self._awaited = {row: step for row, step in self._awaited.items() if step > output.step_id}
            assert pickle.loads(link.receive()) == own.token_ids, "the stages differ"

        def collect() -> ModelRunnerOutput:
            if receive in self._unanswered:
                receive()
            return own

        self._unanswered.append(receive)
        return collect

    def lead(self, link: Link, model: Any = None) -> None:
        assert self.held.start == 0 and len(self.held) < LAYERS
        self._link = link

    def end_lead(self) -> None:
        assert self._link is not None
        self._link.send(END)
        self._link = None

    def hand_over(self, units: Sequence[int], layers: range, data: bytes) -> None:
        assert self._link is not None
        self._link.send(pickle.dumps((units, layers, data)))

    def fetch(self, request_id: str, units: Sequence[int]) -> None:
        assert self._link is not None
        while self._unanswered:
            self._unanswered[0]()
        self._link.send(pickle.dumps((request_id, units)))
        data = self._link.receive()
        if units:
            self.write_past(units, self.held, bytes(data))

    def follow(self, link: Link, kept: dict[str, list[tuple[range, bytes]]] | None = None) -> None:
        assert self.held.stop == LAYERS and len(self.held) < LAYERS
        while (message := link.receive()) != END:
            match pickle.loads(message):
                case (str(name), units):
                    assert kept is not None
                    for layers, data in kept.pop(name):
                        if layers != self.held:
                            link.send(data)
                        elif units:
                            self.write_past(units, layers, data)
                    continue
                case (units, range() as layers, data):
                    self.write_past(units, layers, data)
                    continue
            try:
                tokens = self.compute(pickle.loads(message)).token_ids
            except AssertionError as error:
                link.close()  # the leader must not wait for it
                raise LinkLostError(f"the follower's past is wrong: {error}") from None
            link.send(pickle.dumps(tokens))
