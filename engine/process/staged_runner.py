"""The interface of a model runner that can be a pipeline stage; see `engine.execution.stages.PipelineRunner`."""

from collections.abc import Sequence
from typing import Protocol

from engine.machine.link import Link
from engine.scheduling.output import ModelRunner
from predictor.model import LatencyPredictor


class StagedRunner(ModelRunner, Protocol):
    """A model runner that can drop layers and run as a pipeline stage with another engine's runner (KunServe §4).

    The thread that launches steps calls all methods but `prepare_restore` and `follow`, while no step is in flight.
    `drop` and `restore` may discard the content of units; the caller reads it before.
    """

    def drop(self, keep: range, num_units: int) -> None:
        """Drop all layers except `keep`, and resize the pool to `num_units` units of these layers."""

    def prepare_restore(self, num_units: int) -> None:
        """Load the absent layers into the memory of the units from `num_units` on, which are unused.

        Another thread calls this while steps run.
        """

    def restore(self, num_units: int) -> None:
        """Load all layers and resize the pool to `num_units` units, in whatever state the runner is."""

    def read_past(self, units: Sequence[int], layers: range) -> bytes:
        """Return the K and V of loaded layers in these units."""

    def write_past(self, units: Sequence[int], layers: range, data: bytes) -> None:
        """Write the bytes of `read_past` for as many units and the same layers."""

    def lead(self, link: Link, model: LatencyPredictor | None = None) -> None:
        """Let the other side of the link compute the layers behind the local ones.

        `model` predicts latencies, by which a step is split into parts that keep both sides busy.
        """

    def end_lead(self) -> None:
        """Make the other side return from `follow`. The link is idle afterwards."""

    def follow(self, link: Link) -> None:
        """Compute layers for the leader until it calls `end_lead`. Raise LinkLostError."""
