"""The benchmark of a burst that overflows memory: what it sends, counts and prints."""

import numpy as np
import pytest

from benchmarks import overload
from benchmarks.__main__ import BENCHES
from benchmarks.overload import OverloadRun, arrivals, ratio, show
from loadgen.records import RequestRecord


def test_the_burst_comes_within_a_second_and_is_the_same_in_both_arms() -> None:
    chats, again = (arrivals(2.0, 30.0, 12, 100, 40, seed=1) for _ in range(2))
    assert len(chats) == 15 + 12 and np.array_equal(chats.arrived_at, again.arrived_at)
    assert ((chats.arrived_at >= 10.0) & (chats.arrived_at <= 11.0)).sum() >= 12
    assert chats.input_tokens.min() >= 50 and chats.input_tokens.max() < 150
    assert chats.output_tokens.min() >= 20 and chats.output_tokens.max() < 60


def answer(ttft: float | None, gap: float = 0.1) -> RequestRecord:
    if ttft is None:
        return RequestRecord(0, "online", 2.0, 100, 40, outcome="timeout")
    times = [2.0 + ttft, 2.0 + ttft + gap]
    return RequestRecord(
        0, "online", 2.0, 100, 40, first_token_at=times[0], outcome="ok", chunk_at=times, chunk_tokens=[1, 1]
    )


def test_a_table_and_a_factor() -> None:
    slow = OverloadRun([answer(1.0), answer(8.0, 3.0), answer(None)], (5.0, 0.0, 0.0))
    fast = OverloadRun([answer(1.0), answer(2.0)], (0.0, 1.0, 1.0))
    assert show("recompute", [slow]).split() == ["recompute", "3", "1", "1.00", "8.00", "100", "3.00", "5", "0", "0"]
    assert show("drop", [fast, fast]).split() == ["drop", "4", "0", "1.00", "2.00", "100", "0.10", "0", "2", "2"]
    assert ratio({"recompute": [slow], "swap": [fast], "drop": [fast]}).split(", ")[1::2] == [
        "recompute / drop: 4.00", "swap / drop: 1.00"
    ]  # fmt: skip
    assert "no chat" in ratio({"recompute": [OverloadRun([answer(None)], (0.0, 0.0, 0.0))], "drop": [fast]})


def test_it_can_be_asked_for() -> None:
    assert BENCHES["overload"] == overload.__name__
    with pytest.raises(SystemExit):
        overload.parse(["--seeds", "many"])
