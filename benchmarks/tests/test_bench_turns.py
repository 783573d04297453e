"""The benchmark of a chat's next turn: what it sends, counts and prints."""

import numpy as np
import pytest

from benchmarks import turns
from benchmarks.__main__ import BENCHES
from benchmarks.turns import ANSWER, QUESTION, TurnsRun, conversations, shorter, show
from loadgen.records import RequestRecord


def test_every_turn_repeats_what_was_said() -> None:
    chats = conversations(3, 4, 100, 10.0, seed=1)
    assert len(chats) == 12 and (np.diff(chats.arrived_at) >= 0).all()
    by_chat: dict[int, list[tuple[float, int, tuple[tuple[int, int], ...]]]] = {}
    for at, size, content in zip(chats.arrived_at, chats.input_tokens, chats.content, strict=True):
        by_chat.setdefault(content.segments[0][0], []).append((at, int(size), content.segments))
    assert len(by_chat) == 3
    for sent in by_chat.values():
        for turn, (at, size, segments) in enumerate(sent):
            assert size == 100 + QUESTION + turn * (QUESTION + ANSWER) == sum(length for _, length in segments)
            if turn:
                before = sent[turn - 1]
                assert segments[: len(before[2])] == before[2] and 7.5 <= at - before[0] <= 12.5
    names = [name for sent in by_chat.values() for name, _ in sent[-1][2]]
    assert len(set(names)) == len(names), "no two chats share anything"


def answer(ttft: float | None) -> RequestRecord:
    first = None if ttft is None else 2.0 + ttft
    return RequestRecord(0, "online", 2.0, 1064, ANSWER, first_token_at=first)


def test_a_table_and_a_factor() -> None:
    alone = TurnsRun([answer(0.4), answer(0.6), answer(0.8), answer(None)], (100.0, 0.0))
    host = TurnsRun([answer(0.1), answer(0.15), answer(0.2)], (90.0, 3000.0))
    assert show("host", [host, host]).split() == ["host", "6", "0", "150", "200", "180", "6000"]
    assert show("alone", [alone]).split() == ["alone", "3", "1", "600", "800", "100", "0"]
    found = {"device alone": [alone], "with the host": [host]}
    assert shorter(found).endswith("4.00 x shorter at the median, 4.00 x on average")
    nothing = {"device alone": [TurnsRun([answer(None)], (0.0, 0.0))], "with the host": [host]}
    assert "no later turn" in shorter(nothing)


def test_it_can_be_asked_for() -> None:
    assert BENCHES["turns"] == turns.__name__
    with pytest.raises(SystemExit):
        turns.parse(["--model", "other"])
