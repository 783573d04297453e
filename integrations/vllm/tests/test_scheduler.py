"""The scheduler inside vLLM: every request ends with its tokens, nothing is left, and bad options are refused."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from simulated import Clock, Engine, Machine, make_scheduler, model_folder
from tidemill_vllm import scheduler as plugin
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def drain(engine: Engine) -> None:
    for turn in itertools.count():
        if not engine.is_busy:
            return
        engine.wait()
        assert turn < 60_000, [(r.request_id, r.status, r.num_computed_tokens) for r in engine.scheduler.running]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [8192, 100, 45])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_with_its_tokens(folder: Path, blocks: int, is_async: bool, seed: int) -> None:
    """Chats and offline requests, aborts, preemptions: no block and no request is left."""
    clock = Clock()
    scheduler = make_scheduler(folder, clock, is_async=is_async, blocks=blocks)
    free = scheduler._num_free_blocks()
    engine, rng = Engine(scheduler, clock, depth=1 + is_async), random.Random(seed)
    wanted = {}
    for number in range(60):
        own = f"r{number}"
        wanted[own] = rng.randrange(1, 80)
        engine.add(own, rng.randrange(1, 400), wanted[own], rng.choice((0, 10)))
        for _ in range(rng.randrange(4)):
            engine.turn()
        if number % 11 == 5:
            scheduler.finish_requests(own, RequestStatus.FINISHED_ABORTED)
            del wanted[own]
    drain(engine)
    assert {own: len(engine.emitted[own]) for own in wanted} == wanted
    assert scheduler._num_free_blocks() == free and not scheduler.requests and not scheduler._promises


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_sweep_fits_the_machine_and_leaves_nothing(folder: Path, is_async: bool, tmp_path: Path) -> None:
    clock, machine = Clock(), Machine()
    options = {"slo": "ttft_p99=1s,tbt_p99=150ms", "sweep_seconds": 60, "fit_dir": str(tmp_path)}
    scheduler = make_scheduler(folder, clock, is_async=is_async, options=options)
    free, engine = scheduler._num_free_blocks(), Engine(scheduler, clock, machine, depth=1 + is_async)
    while scheduler._sweep is not None:
        engine.wait()
    drain(engine)
    learner = scheduler._learner
    assert learner.is_fitted and not scheduler.requests and scheduler._num_free_blocks() == free
    (saved,) = tmp_path.iterdir()
    again = make_scheduler(folder, Clock(), is_async=is_async, options=options)
    assert again._sweep is None and again._learner.is_fitted
    assert again._learner.model.model == learner.model.model
    saved.write_text("{")
    assert make_scheduler(folder, Clock(), options=options)._sweep is not None, "a damaged file is measured anew"


def test_a_request_ends_the_sweep(folder: Path) -> None:
    clock = Clock()
    options = {"slo": "ttft_p99=1s,tbt_p99=150ms", "sweep_seconds": 60, "fit_dir": ""}
    scheduler = make_scheduler(folder, clock, options=options)
    engine = Engine(scheduler, clock)
    for _ in range(20):
        engine.turn()
    engine.add("chat", 100, 10, 0)
    drain(engine)
    assert len(engine.emitted["chat"]) == 10 and not scheduler.requests


@pytest.mark.parametrize("noise", [0.06, 0.5])
def test_a_machine_without_a_sweep_is_learned(folder: Path, noise: float) -> None:
    """A step of 180 ms whatever it holds, far from the first guess: offline steps get large, not 32 tokens."""
    clock = Clock()
    scheduler = make_scheduler(folder, clock)
    engine = Engine(scheduler, clock, Machine(base=0.18, token=1e-4, noise=noise))
    for number in range(64):
        engine.add(f"o{number}", 256, 64, 10)
    drain(engine)
    assert scheduler._learner.is_fitted
    assert clock.now - 1000.0 < 0.7 * 64 * 320 * 0.18 / 32, "as slow as steps of 32 tokens"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "no SLO"),
        ({"slo": "ttft=fast"}, "tidemill: "),
        ({"slo": "5%"}, "tolerance"),
        ({"slo": "ttft_p99=1s", "sweep": 1}, "unknown option 'sweep'"),
        ({"slo": "ttft_p99=1s", "sweep_seconds": -1}, "sweep_seconds"),
    ],
)
def test_bad_options_are_refused(folder: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        make_scheduler(folder, Clock(), options=options)
    assert "\n" not in str(caught.value)


def test_fcfs_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="--scheduling-policy priority"):
        make_scheduler(folder, Clock(), policy="fcfs")


def test_an_old_release_runs_its_own_scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.vllm, "__version__", "0.12.0")
    assert type(make_scheduler(folder, Clock())) is Scheduler


def test_a_missing_attribute_runs_its_own_scheduler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_preempt_request")
    assert type(make_scheduler(folder, Clock())) is Scheduler
