"""One batch as micro-batches of a pipeline: by tokens, or balanced by predicted cost (KunServe §4.3, Figures 10-11).

A pipeline stands still where one micro-batch takes longer than the next. Tokens do not tell how long: a chunk far into
a prompt reads all that lies before it, a decode its whole context. So a batch is halved where both sides are predicted
to cost the same, and the halves again, down to a least number of tokens. Each side is charged the constant of a step
once, however many chunks it has (as printed, Equation 1 charges it to each chunk). Pure and torch-free.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from predictor.features import BatchFeatures, FeatureRow
from predictor.model import LatencyPredictor
from predictor.reach import Reach

GRAIN = 16
"""Chunks are cut at multiples of so many tokens."""


class BatchPiece(NamedTuple):
    """Tokens [start, start + length) of `item`, a sequence of the batch. A decode has length 1 and is never cut."""

    item: int
    start: int
    length: int


MicroBatch = list[BatchPiece]


def by_tokens(pieces: Sequence[BatchPiece], count: int) -> list[MicroBatch]:
    """`count` micro-batches of about equally many tokens, in the order given: what engines do today."""
    total, found, rest = sum(piece.length for piece in pieces), [], list(pieces)
    for number in range(count, 1, -1):
        tokens = -(-total // number)
        first, rest = _cut(rest, tokens)
        total -= sum(piece.length for piece in first)
        found.append(first)
    found.append(rest)
    return [batch for batch in found if batch]


def balanced(
    pieces: Sequence[BatchPiece], model: LatencyPredictor, *, stages: int, min_tokens: int, grain: int = GRAIN
) -> list[MicroBatch]:
    """Halves of equal predicted cost, in the order given, and halves of all of those: as often as there must be micro-
    batches for every stage, and further while they have `min_tokens` tokens on average. All are halved equally often,
    or they would cost different times."""
    tokens = sum(piece.length for piece in pieces)
    batches, count = ([list(pieces)] if pieces else []), 1
    while batches and (count < stages or tokens >= 2 * count * min_tokens):
        halves = [half for batch in batches for half in _halve(batch, model, grain) if half]
        if len(halves) == len(batches):
            break
        batches, count = halves, 2 * count
    return batches


def quickest(pieces: Sequence[BatchPiece], model: LatencyPredictor, *, stages: int, most: int = 4) -> list[MicroBatch]:
    """The batch whole, or halved up to `most` micro-batches: what leaves a pipeline first whose stages have equal parts
    of the layers. Few decodes stay together: each half would read all weights."""
    best, least, count = [list(pieces)], cost(pieces, model), 2
    while count <= most:
        batches = balanced(pieces, model, stages=count, min_tokens=sum(piece.length for piece in pieces))
        seconds = max(cost(batch, model) for batch in batches) * (len(batches) + stages - 1) / stages
        if seconds < least:
            best, least = batches, seconds
        count *= 2
    return best


def cost(pieces: Sequence[BatchPiece], model: LatencyPredictor) -> float:
    """Predicted seconds of one micro-batch, by itself, through all layers."""
    features = BatchFeatures(model.reach)
    for _, start, length in pieces:
        features.add_chunk(start, length)
    return model.predict(features)


def _halve(batch: MicroBatch, model: LatencyPredictor, grain: int) -> tuple[MicroBatch, MicroBatch]:
    """The cut at which both sides cost the same, as nearly as can be; costs grow with tokens, so it is found by
    bisection. What cannot be cut is the first half alone."""
    if sum(piece.length for piece in batch) == 1:
        return batch, []
    reach = model.reach
    sums = [FeatureRow(*([0] * len(FeatureRow._fields))), *accumulate((_row(piece, reach) for piece in batch), _plus)]

    def gap(index: int, tokens: int) -> float:
        """Cost of what lies before `tokens` tokens of piece `index`, minus that of the rest."""
        left, right = sums[index], _minus(sums[-1], sums[index])
        if tokens:
            _, start, length = batch[index]
            rest = BatchPiece(0, start + tokens, length - tokens)
            left = _plus(left, _row(BatchPiece(0, start, tokens), reach))
            right = _plus(_minus(right, _row(batch[index], reach)), _row(rest, reach))
        return model.predict(BatchFeatures.from_row(left)) - model.predict(BatchFeatures.from_row(right))

    low, high = 0, len(batch)  # the last piece boundary whose left side costs no more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if gap(middle, 0) <= 0.0 else (low, middle)
    parts, best = (batch[low].length - 1) // grain, 0
    while best < parts:
        middle = (best + parts + 1) // 2
        best, parts = (middle, parts) if gap(low, middle * grain) <= 0.0 else (best, middle - 1)
    ends = [(low, best * grain), (low, min((best + 1) * grain, batch[low].length))]
    index, tokens = min(ends, key=lambda end: abs(gap(*end)) if end[1] < batch[low].length else abs(gap(low + 1, 0)))
    return _cut(batch, sum(piece.length for piece in batch[:index]) + tokens)


def _cut(batch: Sequence[BatchPiece], tokens: int) -> tuple[MicroBatch, MicroBatch]:
    """The first `tokens` tokens, and the rest."""
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
