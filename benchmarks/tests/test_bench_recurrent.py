"""`python -m benchmarks recurrent`: what it says follows from sizes and counts."""

import pytest

from benchmarks import recurrent
from benchmarks.__main__ import BENCHES
from benchmarks.recurrent import HYBRIDS, Hybrid, at_once, chosen, computed_share


@pytest.mark.parametrize("model", HYBRIDS, ids=lambda model: model.name)
def test_what_is_set_aside_fits_into_the_room(model: Hybrid) -> None:
    rows, slots, tokens = model.split()
    assert (rows + slots) * model.state + tokens * model.token <= model.room
    assert rows * model.state <= model.room // 2 and slots > 0
    for context in recurrent.CONTEXTS:
        apart, together = at_once(model, context)
        assert apart <= together  # what is set aside for rows that do not run is K and V's
    apart, together = chosen(model, [600, 4000, 20_000] * 300, [1.0, 2.0, 3.0] * 300)
    assert 0.0 < apart <= together <= 1.0


def test_more_slots_leave_less_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BENCHES["recurrent"] == recurrent.__name__
    monkeypatch.setattr(recurrent, "CHATS", 6)
    monkeypatch.setattr(recurrent, "TURNS", 3)
    monkeypatch.setattr(recurrent, "RUNNING", 2)
    monkeypatch.setattr(recurrent, "ANSWER", 20)
    shares = [computed_share(slots, 512) for slots in (8, 16, 100)]
    assert 1.0 == computed_share(0, 1, prefixes=False) > shares[0] > shares[1] > shares[2]
    assert shares[2] >= computed_share(0, 1)
