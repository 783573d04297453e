"""KunServe's micro-batches of equal cost, by hand and against brute force."""

import hypothesis.strategies as st
from hypothesis import given, settings
from support.fuzz import examples

from benchmarks.simulated_fleet.overload import by_tokens
from engine.execution.stages import BatchPiece, balanced, cost, quickest
from predictor.model import LatencyModel

MODEL = LatencyModel(
    intercept=2e-3,
    knots=(0, 128),
    hinges=(1e-5, 6e-5),
    attention=4e-9,
    decode_context=5e-8,
    decodes=1e-5,
    token_limit=4096,
)


pieces = st.lists(
    st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(2, 900))), min_size=1, max_size=40
).map(lambda rows: [BatchPiece(i, start, length) for i, (start, length) in enumerate(rows)])


def tokens_of(batches: list[list[BatchPiece]]) -> list[tuple[int, int]]:
    return [(item, start + i) for batch in batches for item, start, length in batch for i in range(length)]


@settings(max_examples=examples(60), deadline=None)
@given(batch=pieces, stages=st.integers(1, 5), least=st.integers(1, 600))
def test_micro_batches_hold_every_token_once_and_in_order(batch: list[BatchPiece], stages: int, least: int) -> None:
    for found in (balanced(batch, MODEL, stages=stages, min_tokens=least), by_tokens(batch, stages)):
        assert tokens_of(found) == tokens_of([batch]) and all(found)
    tokens = sum(piece.length for piece in batch)
    assert len(balanced(batch, MODEL, stages=1, min_tokens=tokens)) == 1


@settings(max_examples=examples(60), deadline=None)
@given(batch=pieces)
def test_both_halves_cost_the_same_up_to_one_grain(batch: list[BatchPiece]) -> None:
    found = balanced(batch, MODEL, stages=2, min_tokens=10**9)
    if len(found) == 1:
        assert sum(piece.length for piece in batch) == 1 or len(batch) == 1
        return
    first, second = found
    gap = abs(cost(first, MODEL) - cost(second, MODEL))
    last, nearest = first[-1], second[0]
    grains = [
        cost([BatchPiece(0, p.start, min(16, p.length))], MODEL) - cost([], MODEL) + 17 * 7e-5 for p in (last, nearest)
    ]
    assert gap <= 2 * max(grains)


def test_lookahead_balances_what_tokens_do_not() -> None:
    """Figure 9: chunks far into long prompts beside decodes cost more than their tokens say."""
    batch = [*(BatchPiece(i, 800, 1) for i in range(100)), BatchPiece(100, 0, 900), BatchPiece(101, 6000, 1000)]
    even = [cost(part, MODEL) for part in by_tokens(batch, 2)]
    ours = [cost(part, MODEL) for part in balanced(batch, MODEL, stages=2, min_tokens=512)]
    assert max(even) / min(even) > 1.2
    assert max(ours) / min(ours) < 1.02
    assert len(balanced(batch, MODEL, stages=2, min_tokens=256)) == 4
    assert len(balanced(batch, MODEL, stages=4, min_tokens=10**6)) == 4


def test_a_batch_is_cut_where_that_is_quicker_in_a_pipeline() -> None:
    """Two stages at once: a long prompt gains, a few decodes would only read all weights twice."""
    prompt = [BatchPiece(0, 0, 2000)]
    assert len(quickest(prompt, MODEL, stages=2)) == 4 and len(quickest(prompt, MODEL, stages=2, most=2)) == 2
    assert quickest([BatchPiece(i, 800, 1) for i in range(8)], MODEL, stages=2) == [
        [BatchPiece(i, 800, 1) for i in range(8)]
    ]
    assert quickest([BatchPiece(0, 5, 1)], MODEL, stages=2) == [[BatchPiece(0, 5, 1)]]
