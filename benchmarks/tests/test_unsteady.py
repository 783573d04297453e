"""The live loop on a machine whose speed changes within seconds, on the virtual clock (`--experiment unsteady`)."""

from dataclasses import replace

import pytest

from benchmarks.experiments.unsteady import CONFIG, SHORT, STEPPED, Config, Speed, misses, replay, run_seed, summary


def kept(machine: float, seconds: float, seed: int, *, offline: bool) -> tuple[float, float]:
    """The share of chats that kept both limits, and offline tokens/s."""
    config = replace(CONFIG, window=seconds)
    run, _ = replay(config, machine, seed, offline=offline)
    return sum(not any(misses(config, record)) for record in run.online) / len(run.online), run.offline_tokens / run.end


def test_with_room_to_spare_a_machine_that_changes_its_speed_keeps_the_promise() -> None:
    share, offline = kept(1.0, 120.0, 0, offline=True)
    assert share >= 0.97
    assert offline > 200.0


@pytest.mark.parametrize(("offline", "least"), [(False, 0.8), (True, 0.65)])
def test_where_the_least_chunk_takes_longer_than_the_limit_it_is_made_smaller(offline: bool, least: float) -> None:
    """With 64 tokens in every step it was 63 % alone, and 46 % beside offline work; now 89 and 74 %."""
    share, _ = kept(1.5, 200.0, 1, offline=offline)
    assert share >= least


def kept_of(config: Config, seeds: range, *, offline: bool) -> tuple[float, float]:
    """The same of several seeds together."""
    found, tokens = [], []
    for seed in seeds:
        run, _ = replay(config, *config.machines, seed, offline=offline)
        found += [not any(misses(config, record)) for record in run.online]
        tokens.append(run.offline_tokens / run.end)
    return sum(found) / len(found), sum(tokens) / len(tokens)


def test_a_rate_in_steps_is_kept_beside_offline_work_as_without_it() -> None:
    """Where a grant shrank only with misses it was 97.9 % beside 412 tokens/s, and 99.6 % alone."""
    alone, _ = kept_of(STEPPED, range(710, 714), offline=False)
    beside, offline = kept_of(STEPPED, range(710, 714), offline=True)
    assert alone > 0.99 and beside >= alone - 0.01
    assert offline > 330.0


def test_the_speed_of_a_machine_is_a_function_of_the_clock() -> None:
    """However work is cut, it ends at the same time; usual work takes between the two factors of its time."""
    whole, parts = Speed(CONFIG, 3), Speed(CONFIG, 3)
    now = 0.0
    for _ in range(100):
        now += parts.seconds(0.5, now)
    assert now == pytest.approx(whole.seconds(50.0, 0.0))
    assert 50.0 * CONFIG.factors[0] < now < 50.0 * CONFIG.factors[1]


def test_the_experiment_has_a_row_for_each_machine_and_arm() -> None:
    config = replace(SHORT, window=10.0)
    results = run_seed(config, None, 0, 1, lambda _text: None)
    assert results == run_seed(config, None, 0, 1, lambda _text: None), "it is deterministic"
    _, rows = summary(results)
    assert [row[:2] for row in rows] == [
        [machine, arm] for machine in config.machines for arm in ("alone", "beside offline work")
    ]
    assert all(row[2] > 0 for row in rows)
