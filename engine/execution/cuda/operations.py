"""The cache operations of a step: neighbours of one action as one batch, in their order, nothing waited for."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from engine.execution.cuda.hidden import Projection
from engine.execution.cuda.swap import Swapper
from engine.execution.operations import restored_units, swapped_units
from engine.scheduling.output import CacheAction, CacheOperation


def run_operations(operations: Sequence[CacheOperation], projection: Projection, swapper: Swapper) -> None:
    """Launch the operations of one step; the steps' lane is in order behind them."""
    for action, group in groupby(operations, key=lambda operation: operation.action):
        batch = list(group)
        if action is CacheAction.RESTORE:
            starts = np.array([each.start for each in batch], dtype=np.int64)
            projection.restore(restored_units(batch), starts)
        elif action is CacheAction.SWAP_IN:
            swapper.swap_in(swapped_units(batch, inwards=True))
        else:
            swapper.swap_out(swapped_units(batch, inwards=False))
