"""Promises of chats: deadlines, classes, verdicts."""

import math

import pytest
from tidemill_vllm.promises import Promises

from predictor.slo import SLO, SLOError

TWO = "ttft_p99=1s,tbt_p99=100ms;premium:ttft_p99=300ms,tbt_p99=50ms"


def test_deadlines() -> None:
    promises = Promises(SLO.parse(TWO))
    assert (promises.ttft, promises.tbt) == (0.3, 0.05)
    promises.add("a", 10.0, None)
    promises.add("b", 10.0, {"tidemill": "premium"})
    promises.add("c", 10.0, {"tidemill": "ttft_p99=200ms"})
    promises.add("d", 10.0, {"tidemill": {"strange": 1}, "other": 2})
    assert [promises.first_due(own) for own in "abcd"] == [11.0, 10.3, 10.2, 11.0]
    assert [promises.gap(own) for own in "abcd"] == [0.1, 0.05, 0.1, 0.1]
    promises.emitted("b", 1, 10.1, is_last=False)
    assert promises.first_due("b") == pytest.approx(10.15) and promises.first_due("unknown") == math.inf


def test_each_class_has_its_own_verdict() -> None:
    promises = Promises(SLO.parse(TWO))
    for number in range(40):
        for own, extra in (("a", None), ("b", {"tidemill": "premium"})):
            promises.add(own, float(number), extra)
            promises.mark_beside([own])
            promises.emitted(own, 1, number + 0.5, is_last=False)  # late for premium alone
            promises.emitted(own, 2, number + 0.54, is_last=True)
    status = promises.status(39.6)
    assert status["default"]["attainment"] == 1.0 and status["premium"]["attainment"] == 0.0
    assert promises.breakers["premium"].num_openings and promises.share(39.6) <= 0.125
    assert promises.attainment(39.6) == 0.5 and not promises


def test_aborted_requests_are_not_judged() -> None:
    promises = Promises(SLO.parse("ttft_p99=1s"))
    promises.add("a", 0.0, None)
    promises.forget("a")
    promises.emitted("a", 1, 9.0, is_last=True)
    assert math.isnan(promises.attainment(10.0)) and promises.tbt == math.inf


def test_a_tolerance_is_refused() -> None:
    with pytest.raises(SLOError, match="tolerance"):
        Promises(SLO.parse("5%"))
