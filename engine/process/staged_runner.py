"""What two engines that become one pipeline ask of their runners, `engine.execution.stages.PipelineRunner` for one."""

from collections.abc import Sequence
from typing import Protocol

from engine.machine.link import Link
from engine.scheduling.output import ModelRunner
from predictor.model import LatencyPredictor


class StagedRunner(ModelRunner, Protocol):
    """One whose model can lose layers, and run as a stage of a pipeline with another engine's (KunServe §4). All but
    `follow` is called by the thread that launches steps, while none is in flight.

    What lies in units need not outlast `drop` and `restore`: what is still wanted was read before.
    """

    def drop(self, keep: range, num_units: int) -> None:
        """Give up all layers but these, and make room for so many units of theirs."""

    def prepare_restore(self, num_units: int) -> None:
        """Load the layers that are absent into the memory of units from `num_units` on, which hold nothing any more; by
        another thread, beside steps."""

    def restore(self, num_units: int) -> None:
        """All layers and so many units of them, whatever has happened before."""

    def read_past(self, units: Sequence[int], layers: range) -> bytes:
        """K and V of some of the layers that are here."""

    def write_past(self, units: Sequence[int], layers: range, data: bytes) -> None:
        """The opposite, for as many units and the same layers."""

    def lead(self, link: Link, model: LatencyPredictor | None = None) -> None:
        """From now on the other side of the link computes the layers behind those that are here; by `model` it is
        decided into which parts a step is cut, so that both sides have something to do."""

    def end_lead(self) -> None:
        """Have the other side return from `follow`; the link is at rest then."""

    def follow(self, link: Link) -> None:
        """Compute for the other side until it ends that. Raises LinkLostError."""
