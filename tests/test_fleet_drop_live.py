"""Two engines of the demo model whose memory overflows: they become one pipeline by themselves, answer as each request
alone is answered, and are two again. Slow: real models in real processes."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from driver import until
from test_fleet_pipelines import ends_whole, killing_before, overload_of
from test_process import collect

from engine.api import EngineRequest, SamplingParams
from engine.client import EngineState, PipelineStats
from engine.config import EngineConfig
from engine.fleet.client import FleetClient
from engine.fleet.launch import make_fleet
from engine.process.requests import RestartPolicy

BLOCKS = 48
CONFIG = EngineConfig(
    num_gpu_blocks_override=BLOCKS, overload="drop", dtype="float32", profile_seconds=0.0, threads=1,
    slo="ttft_p99=200s,tbt_p99=100s", max_queue_time="none", self_test=False,
)  # fmt: skip


@asynccontextmanager
async def two_engines(folder: Path) -> AsyncIterator[FleetClient]:
    config = CONFIG
    fleet = make_fleet(config, 2, folder / "engine.pid", log_level="info")
    await asyncio.to_thread(fleet.load, lambda _planned: None)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


def burst(number: int, seed: int = 0) -> list[EngineRequest]:
    dice = random.Random(seed)
    sampling = SamplingParams(max_tokens=60, temperature=0.0)
    prompts = [tuple(dice.randrange(300, 2000) for _ in range(dice.randrange(40, 100))) for _ in range(number)]
    return [EngineRequest(f"r{index:02}", prompt, sampling) for index, prompt in enumerate(prompts)]


async def tokens_of(fleet: FleetClient, request: EngineRequest) -> list[int]:
    return [token for output in await collect(fleet, request) for token in output.token_ids]  # type: ignore[arg-type]


async def pipelines(fleet: FleetClient) -> PipelineStats:
    stats = await fleet.stats()
    assert stats.pipelines is not None
    return stats.pipelines


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines run on: as processes of this machine do, or by the GPU's runner over a stand-in for its driver."""
    monkeypatch.setattr("engine.process.life.RestartPolicy", lambda: RestartPolicy(9999, max_delay=0.1))
    if request.param == "gpu":
        child = str(Path(__file__).with_name("cuda_child.py"))
        monkeypatch.setattr("engine.process.launcher.python_module", lambda *_: [sys.executable, child])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("device")
async def test_a_burst_makes_one_pipeline_of_two_engines_and_its_end_two_again(tmp_path: Path) -> None:
    requests = burst(40)
    async with two_engines(tmp_path) as fleet:
        alone = [await tokens_of(fleet, request) for request in requests]
        assert await asyncio.gather(*[tokens_of(fleet, request) for request in requests]) == alone
        assert (await pipelines(fleet)).drops >= 1
        await until(lambda: fleet._overload is not None and not fleet._overload.pipelines.pairs)
        stats = await fleet.stats()
        assert stats.pipelines is not None and stats.pipelines.restores >= 1 and stats.pipelines.failures == 0
        assert fleet.state is EngineState.READY
        assert await tokens_of(fleet, requests[0]) == alone[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("way", "step", "dies"),
    [
        ("merge", "Stall", 1),
        ("merge", "Reform", 0),
        ("merge", "Go", 1),
        ("split", "Reform", 1),
        ("split", "Go", 0),
    ],
)
@pytest.mark.usefixtures("device")
async def test_an_engine_killed_on_the_way_costs_time_only(way: str, step: str, dies: int, tmp_path: Path) -> None:
    requests = burst(12, seed=1)
    async with two_engines(tmp_path) as fleet:
        overload = overload_of(fleet)
        alone = [await tokens_of(fleet, request) for request in requests]
        asked = asyncio.gather(*[tokens_of(fleet, request) for request in requests])
        if way == "split":
            assert await overload.merge(*fleet._members)
        with killing_before(step, dies, tmp_path):
            if way == "merge":
                assert not await overload.merge(*fleet._members)
            else:
                assert not await overload.pipelines.split(overload.pipelines.pairs[0])
        await ends_whole(fleet, overload, 2 * BLOCKS)
        assert await asked == alone
