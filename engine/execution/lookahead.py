"""Split a batch into micro-batches of a pipeline by predicted cost (KunServe §4.3, Figures 10-11).

A stage idles if one micro-batch takes longer than the next. The number of tokens does not determine the time: a chunk
late in a prompt reads all tokens before it, and a decode reads its whole context. A batch is therefore halved so that
both sides have the same predicted cost, and the halves again, down to a minimum number of tokens. Each micro-batch is
charged the constant of a step once (Equation 1 in the paper charges it to each chunk). Torch-free.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from predictor.features import BatchFeatures, FeatureRow, LatencyPredictor, Reach

GRAIN = 16
"""Chunks are cut at multiples of this number of tokens."""


class BatchPiece(NamedTuple):
    """Tokens [start, start + length) of `item`, a sequence of the batch. A decode has length 1 and is never cut."""

    item: int
    start: int
    length: int


MicroBatch = list[BatchPiece]


def balanced(
    pieces: Sequence[BatchPiece], model: LatencyPredictor, *, stages: int, min_tokens: int, grain: int = GRAIN
) -> list[MicroBatch]:
    """Halve the pieces, in order, repeatedly into micro-batches of equal predicted cost.

    All micro-batches are halved until there is one per stage, and further while the halves have at least `min_tokens`
    tokens on average. All are halved equally often, so that their costs stay equal.
    """
    tokens = sum(piece.length for piece in pieces)
    batches, count = ([list(pieces)] if pieces else []), 1
    while batches and (count < stages or tokens >= 2 * count * min_tokens):
        halves = [half for batch in batches for half in _halve(batch, model, grain) if half]
        if len(halves) == len(batches):
            break
        batches, count = halves, 2 * count
    return batches


def quickest(pieces: Sequence[BatchPiece], model: LatencyPredictor, *, stages: int, most: int = 4) -> list[MicroBatch]:
    """Return the batch as 1, 2, ... `most` micro-batches, whichever is predicted to leave the pipeline first.

    The stages have equal parts of the layers. A few decodes stay together, because each half would read all weights.
    """
    best, least, count = [list(pieces)], cost(pieces, model), 2
    while count <= most:
        batches = balanced(pieces, model, stages=count, min_tokens=sum(piece.length for piece in pieces))
        seconds = max(cost(batch, model) for batch in batches) * (len(batches) + stages - 1) / stages
        if seconds < least:
            best, least = batches, seconds
        count *= 2
    return best


def cost(pieces: Sequence[BatchPiece], model: LatencyPredictor) -> float:
    """Return the predicted seconds of one micro-batch through all layers, without other micro-batches."""
    features = BatchFeatures(model.reach)
    for _, start, length in pieces:
        features.add_chunk(start, length)
    return model.predict(features)


def _halve(batch: MicroBatch, model: LatencyPredictor, grain: int) -> tuple[MicroBatch, MicroBatch]:
    """Cut a micro-batch so that both sides cost nearly the same. If it cannot be cut, the second half is empty.

    Costs grow with tokens, so the cut is found by bisection.
    """
    if sum(piece.length for piece in batch) == 1:
        return batch, []
    reach = model.reach
    sums = [FeatureRow(*([0] * len(FeatureRow._fields))), *accumulate((_row(piece, reach) for piece in batch), _plus)]

    def gap(index: int, tokens: int) -> float:
        """Return the cost of the part before token `tokens` of piece `index`, minus the cost of the remainder."""
        left, right = sums[index], _minus(sums[-1], sums[index])
        if tokens:
            _, start, length = batch[index]
            rest = BatchPiece(0, start + tokens, length - tokens)
            left = _plus(left, _row(BatchPiece(0, start, tokens), reach))
            right = _plus(_minus(right, _row(batch[index], reach)), _row(rest, reach))
        return model.predict(BatchFeatures.from_row(left)) - model.predict(BatchFeatures.from_row(right))

    low, high = 0, len(batch)  # find the last piece boundary at which the left side does not cost more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gap(middle, 0) <= 0.0 else (low, middle)
    parts, best = (batch[low].length - 1) // grain, 0
    while best < parts:
        middle = (best + parts + 1) // 2
        best, parts = (middle, parts) if gap(low, middle * grain) <= 0.0 else (best, middle - 1)
    ends = [(low, best * grain), (low, min((best + 1) * grain, batch[low].length))]
    index, tokens = min(ends, key=lambda end: abs(gap(*end)) if end[1] < batch[low].length else abs(gap(low + 1, 0)))
    return cut(batch, sum(piece.length for piece in batch[:index]) + tokens)


def cut(batch: Sequence[BatchPiece], tokens: int) -> tuple[MicroBatch, MicroBatch]:
    """Return the first `tokens` tokens and the remainder."""
    first: MicroBatch = []
    for index, piece in enumerate(batch):
        if tokens < piece.length:
            if tokens:
                first.append(BatchPiece(piece.item, piece.start, tokens))
                piece = BatchPiece(piece.item, piece.start + tokens, piece.length - tokens)
            return first, [piece, *batch[index + 1 :]]
        first.append(piece)
        tokens -= piece.length
    return first, []


def _row(piece: BatchPiece, reach: Reach) -> FeatureRow:
    features = BatchFeatures(reach)
    features.add_chunk(piece.start, piece.length)
    return features.row()


def _plus(one: FeatureRow, other: FeatureRow) -> FeatureRow:
    return FeatureRow(*(a + b for a, b in zip(one, other, strict=True)))


def _minus(one: FeatureRow, other: FeatureRow) -> FeatureRow:
    return FeatureRow(*(a - b for a, b in zip(one, other, strict=True)))
