"""The papers' orderings in small: every experiment on its quick load, with its table and figures."""

import math
from xml.etree import ElementTree

import pytest

from benchmarks.experiments.main import EXPERIMENTS
from benchmarks.experiments.orderings import QUICK, Ordering
from benchmarks.experiments.replay import one_by_one
from benchmarks.experiments.table import Result


def test_every_experiment_has_a_quick_load() -> None:
    assert set(QUICK) == set(EXPERIMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUICK))
def test_the_ordering_of_the_paper(name: str) -> None:
    experiment, quick = EXPERIMENTS[name], QUICK[name]
    results: list[Result] = []
    for seed in range(quick.seeds):
        results += experiment.run_seed(quick.config, None, seed, one_by_one, lambda _text: None)
    failed = [each for each in quick.orderings(results) if not each.holds]
    assert not failed
    header, rows = experiment.summary(results)
    assert rows and all(len(row) == len(header) for row in rows)
    for drawn in experiment.figures(results).values():
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
    values = [value for result in results for value in result.metrics.values() if value is not None]
    assert all(math.isfinite(value) for value in values)


def test_an_ordering_of_two_zeros_shows_nothing() -> None:
    assert Ordering("", 1.0, 1.2, 1.2).holds and not Ordering("", 1.0, 1.19, 1.2).holds
    assert Ordering("", 0.0, 0.1, 2.0).holds and not Ordering("", 0.0, 0.0).holds
