"""An engine that computes much slower than it should is drained and started again, and the others do not notice."""

import asyncio
from typing import Any

import pytest
from test_fleet_fuzz import Client, FakeFleetEngine

from engine.api import EngineRequest, LoadReport, RequestClass, SamplingParams
from engine.fleet.client import FleetClient
from engine.fleet.slow import BACK_OFF, FRESH, PATIENCE, SPAN, SlowWatch
from gateway.telemetry.fleet_metrics import engine_metrics, shown
from predictor.features import BatchFeatures
from predictor.model import LatencyModel
from predictor.online import OnlineModel


def hear(watch: SlowWatch, now: float, *slowness: float, busy: float = 1.0) -> int | None:
    """All engines have computed since the start at so many times their profiles' seconds."""
    for engine, ratio in enumerate(slowness):
        watch.hear(engine, LoadReport(time=now, device_seconds=busy * now, profile_seconds=busy * now / ratio), now)
    return watch.find(now)


def when(watch: SlowWatch, *slowness: float, seconds: int = 60, busy: float = 1.0) -> float | None:
    return next(
        (float(now) for now in range(seconds) if hear(watch, float(now), *slowness, busy=busy) is not None), None
    )


def test_who_is_slow_beside_the_others_for_a_while_is_found() -> None:
    watch = SlowWatch()
    assert when(watch, 1.0, 5.0, 1.2) == SPAN + PATIENCE
    assert watch.find(SPAN + PATIENCE) == 1 and watch.slowness(1, SPAN + PATIENCE) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("slowness", "busy"),
    [((1.0, 2.5), 1.0), ((4.0, 5.0), 1.0), ((4.0, 2.0, 2.0), 1.0), ((5.0,), 1.0), ((1.0, 5.0), 0.2)],
    ids=["a little", "the machine is slow", "all are rather slow", "nobody to compare with", "hardly anything to do"],
)
def test_who_is_not(slowness: tuple[float, ...], busy: float) -> None:
    assert when(SlowWatch(), *slowness, busy=busy) is None


def test_a_moment_is_not_a_while_and_nothing_is_held_against_the_next_process() -> None:
    watch = SlowWatch()
    hear(watch, 0.0, 1.0, 5.0)
    hear(watch, SPAN, 1.0, 5.0)
    assert watch.slowness(1, SPAN) == pytest.approx(5.0) and watch.slowness(1, SPAN + FRESH + 1) == 0.0
    watch.hear(1, LoadReport(time=SPAN, device_seconds=0.1, profile_seconds=0.1), SPAN)
    assert watch.slowness(1, SPAN) == 0.0
    watch.hear(0, None, SPAN)
    assert watch.slowness(0, SPAN) == 0.0


def test_who_is_slow_again_waits_longer_each_time() -> None:
    watch, now, times = SlowWatch(), 0.0, []
    while len(times) < 3:
        now += SPAN
        if hear(watch, now, 1.0, 5.0) is not None:
            times.append(now)
            watch.restarted(1, now)
    assert times[1] - times[0] == pytest.approx(BACK_OFF, abs=SPAN)
    assert times[2] - times[1] == pytest.approx(2 * BACK_OFF, abs=SPAN)


def test_steps_are_measured_by_the_profile_that_the_process_began_with() -> None:
    features = BatchFeatures()
    features.add_chunk(0, 16)
    profile = LatencyModel(intercept=0.01)
    model = OnlineModel(profile)
    for _ in range(50):
        model.observe(features, 0.052, host=0.002)
    model.replace(LatencyModel(intercept=0.05))  # a new fit has taken the slowness for granted
    for _ in range(50):
        model.observe(features, 0.052, host=0.002)
    assert (model.device_seconds, model.profile_seconds) == pytest.approx((5.0, 1.0))


class Engines:
    """Three engines that compute all the time, one second a round."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fakes: list[FakeFleetEngine] = []
        self.fleet = FleetClient(self._make, 3, lines=4, clock=lambda: self.now)
        self.clients: list[Client] = []

    def _make(self, _number: int, changed: Any) -> Any:
        self.fakes.append(FakeFleetEngine(changed))
        self.fakes[-1].clock = lambda: self.now
        return self.fakes[-1]

    def ask(self, tokens: int, offline: bool = False) -> None:
        kind = RequestClass.OFFLINE if offline else RequestClass.ONLINE
        name = f"{len(self.clients):03}"
        request = EngineRequest(name, (len(self.clients),) * 5, SamplingParams(max_tokens=tokens), kind, job="job")
        self.clients.append(Client(self.fleet, [request]))

    async def second(self) -> None:
        self.now += 1.0
        for fake in self.fakes:
            if fake.slowness == 1.0 or self.now % 5 == 0:
                fake.step()
            fake.tell_time()
        for _ in range(8):
            await asyncio.sleep(0)


async def test_a_slow_engine_is_drained_and_started_again_and_nobody_else_notices() -> None:
    engines = Engines()
    fleet, (_, slow, _) = engines.fleet, engines.fakes
    await fleet.start()
    await fleet.slow.stop()  # looks are asked for here
    try:
        for number in range(9):
            engines.ask(tokens=60, offline=number >= 6)
        await engines.second()
        assert {entry.is_online for entry in slow.open} == {True, False}
        slow.slowness = 5.0
        looking = asyncio.ensure_future(fleet.slow.look())
        while not fleet._members[1].leaves:
            assert engines.now <= 2 * (SPAN + PATIENCE)
            await looking
            looking = asyncio.ensure_future(fleet.slow.look())
            await engines.second()
        assert engines.now >= SPAN + PATIENCE
        given = fleet._members[1].routed
        for _ in range(3):  # while it is drained
            engines.ask(tokens=5)
            engines.ask(tokens=5, offline=True)
        await engines.second()
        assert fleet._members[1].routed == given and slow.renewals == 0 and len(slow.open)
        stats = await fleet.stats()
        assert "5.0 times what its latency profile says" in str(shown(stats.engines)[1]["trouble"])
        samples = {(s.name, s.labels["engine"]): s.value for m in engine_metrics(stats.engines) for s in m.samples}
        assert samples["tidemill_engine_slowness", "1"] == pytest.approx(5.0)
        for _ in range(10):
            await engines.second()
        fleet._on_change()  # its time to end by itself is over
        await looking
        assert [fake.renewals for fake in engines.fakes] == [0, 1, 0] and not len(slow.open)
        assert fleet._members[1].moved and not fleet._members[1].leaves
        assert [view.slow_restarts for view in (await fleet.stats()).engines] == [0, 1, 0]
        for _ in range(200):
            await engines.second()
        await fleet.slow.look()
        assert slow.renewals == 1, "not again so soon"
        for client in engines.clients:
            client.check(lost=0, aborted=False)
    finally:
        await fleet.stop()
