"""A request that ends engine processes costs its five deaths once, however often and under whichever id it comes."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import is_error, submit_one, until
from test_process import CONFIG, POISON, collect, engine_process, request, summed, undisturbed, until_idle

from engine.api import EngineRequest, SamplingParams
from engine.errors import EngineStepError
from engine.forms import Grammar
from engine.process import suspects
from engine.process.requests import RestartPolicy
from engine.process.suspects import LONE_DEATHS, REMEMBERED_SECONDS, SUSPECT_AFTER, Reputation, Suspicion

__all__ = ["undisturbed"]


def poison(name: str, number: int = 0) -> EngineRequest:
    return EngineRequest(name, (POISON, number, 3), SamplingParams(max_tokens=9))


def test_content_is_known_under_another_id_and_with_another_seed() -> None:
    known, asked = Reputation(), request("a", seed=1)
    assert known.find(asked, 0.0) is None
    known.remember(asked, Suspicion(passes_at=9, deaths=2), 0.0)
    again = replace(request("a", seed=2), request_id="b")
    assert known.find(again, 1.0) == (Suspicion(passes_at=9, deaths=2), False)
    for other in (
        request("c"),
        replace(asked, cache_salt=b"of another tenant"),
        replace(asked, adapter=1),
        replace(asked, sampling=replace(asked.sampling, min_tokens=3)),
    ):
        assert known.find(other, 1.0) is None
    known.forget(again)
    assert known.find(asked, 1.0) is None


def test_a_grammar_is_known_with_another_prompt_if_its_preparation_was_deadly() -> None:
    known, grammar = Reputation(), Grammar("regex", "a")
    known.remember(request("a", grammar=grammar), Suspicion(passes_at=1, deaths=2), 0.0)
    assert known.find(request("b", grammar=grammar), 1.0) is not None
    assert (
        known.find(request("a"), 1.0) is None and known.find(request("a", grammar=Grammar("regex", "b")), 1.0) is None
    )
    known.clear()
    known.remember(request("a", grammar=grammar), Suspicion(passes_at=12, deaths=2), 0.0)
    assert known.find(request("b", grammar=grammar), 1.0) is None, "it died in a step"


def test_what_is_known_is_bounded_and_ends_and_guilt_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MAX_REMEMBERED", 2)
    known = Reputation()
    known.remember(request("a"), Suspicion(9, 5), 0.0, guilty=True)
    known.remember(request("a"), Suspicion(9, 2), 1.0)
    assert known.find(request("a"), REMEMBERED_SECONDS) == (Suspicion(9, 5), True)
    assert known.find(request("a"), REMEMBERED_SECONDS + 0.1) is None and not known._entries
    for name in ("a", "b", "c"):
        known.remember(request(name), Suspicion(9, 2), 0.0)
    assert known.find(request("a"), 0.0) is None and known.find(request("c"), 0.0) is not None
    found = known.find(request("c"), 0.0)
    assert found is not None
    found[0].deaths = 99
    assert known.find(request("c"), 0.0) == (Suspicion(9, 2), False), "each request has its own"


@pytest.mark.slow
async def test_who_took_part_in_a_death_waits_until_it_is_judged_and_costs_no_death_again(tmp_path: Path) -> None:
    """For longer than a new request waits for an engine; and not with another prompt either."""
    config = replace(CONFIG, slo="ttft_p99=0.1s", max_queue_time="0.1s")
    grammar = Grammar("regex", "poison")
    async with engine_process(tmp_path / "children", config=config) as engine:
        outputs = await collect(engine, request("bad", grammar=grammar))
        assert is_error(outputs[-1], EngineStepError)
        deaths = sum((await engine.stats()).restarts.values())
        assert deaths >= SUSPECT_AFTER + LONE_DEATHS and len(engine.judge.policy._deaths) <= 1
        await until(lambda: engine.is_up)
        for name in ("bad", "other"):
            with pytest.raises(EngineStepError, match=f"ended {deaths} times"):
                await engine.submit([request("good"), request(name, grammar=grammar)])
        assert sum((await engine.stats()).restarts.values()) == deaths
        await until_idle(engine)


@pytest.mark.slow
async def test_answers_of_one_request_are_judged_together(tmp_path: Path) -> None:
    async with engine_process(tmp_path / "children", f"poison:{POISON}:1-99") as engine:
        streams = await engine.submit([replace(poison(f"p{n}"), sampling=SamplingParams(9, seed=n)) for n in range(3)])
        reading = [asyncio.create_task(_last(stream)) for stream in streams]
        await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        assert not len(engine._requests), "one killer is proven, and all have ended"
        for last in reading:
            assert is_error(await last, EngineStepError)
        await until_idle(engine)


@pytest.mark.slow
async def test_who_leaves_before_the_proof_is_tried_when_it_comes_again(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    policy = RestartPolicy(3, max_delay=0.05)
    async with engine_process(tmp_path / "children", f"poison:{POISON}:1-99", policy=policy) as engine:
        restarts = engine._figures.restarts
        for number in range(SUSPECT_AFTER):
            deaths = restarts.total()
            stream = await submit_one(engine, poison(f"p{number}"))
            await until(lambda deaths=deaths: restarts.total() > deaths)  # type: ignore[misc]
            engine.abort(f"p{number}")
            assert (await _last(stream)).error is None
        assert summed(await collect(engine, request("seeded", seed=3))) == undisturbed["seeded"]
        assert not policy._deaths, "the engine works without it"
        before = restarts.total()
        assert is_error(await _last(await submit_one(engine, poison("again"))), EngineStepError)
        assert restarts.total() - before <= LONE_DEATHS + 2, "it is alone from its first step on"
        await until_idle(engine)


async def _last(stream: Any) -> Any:
    return [output async for output in stream][-1]


@pytest.mark.slow
async def test_clients_that_send_one_killer_after_another_do_not_end_the_server(
    tmp_path: Path, undisturbed: dict[str, tuple[Any, ...]]
) -> None:
    policy = RestartPolicy(4, max_delay=0.05)

    async def send(client: int) -> None:
        for number in range(2):
            outputs = await collect(engine, poison(f"{client}-{number}", 2 * client + number))
            assert is_error(outputs[-1], EngineStepError)

    async with engine_process(tmp_path / "children", f"poison:{POISON}:1-999", policy=policy) as engine:
        sending = asyncio.gather(send(0), send(1), send(2))
        served = 0
        while not sending.done() or not served:
            asked = replace(request("seeded", seed=3), request_id=f"innocent{served}")
            assert summed(await collect(engine, asked))[0] == undisturbed["seeded"][0]
            served += 1
        await sending
        assert len(policy._deaths) <= 1
        await until_idle(engine)
