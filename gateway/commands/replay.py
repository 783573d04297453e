"""`tidemill replay FILE`: the last steps before an engine process ended, or before a step failed, as a table. With
`--model`: the requests that were open then run again, one after another, where they were."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine.api import EngineRequest, FinishReason, RequestClass, RequestOutput, RequestTimes, Resumption
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flight import file as flight_file
from engine.flight import recorder as flight
from engine.process.client import EngineProcess
from engine.process.policy import RestartPolicy

FURTHER = 8
"""Tokens that a request goes on for: what ends a process was in the step behind the last token."""


def run(path: Path, model: str | None = None, say: Callable[[str], None] = print) -> int:
    """Print a recording, and with `model` run its requests; 1 if one of them fails or ends a process. Raises
    ConfigError for a file that is none, or for a model that does not load."""
    recording = flight_file.load(path)
    for line in table(recording):
        say(line)
    if model is None:
        return 0
    facts = recording.facts
    config = EngineConfig(model=model, dtype=facts.dtype, device=facts.device.partition(":")[0])
    if any(request.adapter is not None for request in recording.requests):
        config = replace(config, allowed_lora_dir="/")  # they lie wherever the server's lay
    return rerun(recording, EngineProcess(config, policy=patient()), say)


def patient() -> RestartPolicy:
    """Starts a process again as often as it takes to know whose fault its end is."""
    return RestartPolicy(max_deaths=1_000_000, max_delay=0.0)


def rerun(recording: flight_file.Recording, engine: EngineProcess, say: Callable[[str], None]) -> int:
    """Run the open requests of a recording alone, those first that were in the last steps."""
    last = flight.in_flight(recording.entries)
    requests = sorted(recording.requests, key=lambda request: request.request_id not in last)
    if not requests:
        raise ConfigError("the recording holds no tokens of open requests: --flight-tokens makes the server keep them")
    engine.load(lambda _planned: None)
    return asyncio.run(_run_each(engine, requests, say))


async def _run_each(
    engine: EngineProcess, requests: Sequence[flight_file.OpenTokens], say: Callable[[str], None]
) -> int:
    await engine.start()
    failed = 0
    try:
        for adapter in dict.fromkeys(request.adapter for request in requests if request.adapter is not None):
            await engine.load_adapter(adapter)
        for request in requests:
            before = sum((await engine.stats()).restarts.values())
            [stream] = await engine.submit([_go_on(request)])
            outputs: list[RequestOutput] = [output async for output in stream]
            ends = sum((await engine.stats()).restarts.values()) - before
            is_well = not ends and outputs[-1].finish_reason is not FinishReason.ERROR
            error = outputs[-1].error
            what = "runs" if is_well else "" if error is None else error.message
            deaths = f"the engine process ended {ends} times; " if ends else ""
            say(f"{request.request_id}, {len(request.token_ids)} tokens of its answer given: {deaths}{what}")
            failed += not is_well
    finally:
        await engine.stop()
    return int(failed > 0)


def _go_on(request: flight_file.OpenTokens) -> EngineRequest:
    given, sampling = request.token_ids, request.sampling
    most = min(sampling.max_tokens, len(given) + FURTHER)
    sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
    resumed = Resumption(given, RequestTimes(0.0)) if given else None
    return EngineRequest(
        request.request_id,
        request.prompt_token_ids,
        sampling,
        RequestClass.OFFLINE,
        b"replay",
        resumed=resumed,
        adapter=0 if request.adapter is None else request.adapter.number,
    )


def table(recording: flight_file.Recording) -> Iterator[str]:
    """A line for each step, its time before the end, and who was in the last ones."""
    facts, entries = recording.facts, recording.entries
    yield f"{facts.cause}: {facts.model}, {facts.dtype} on {facts.device}; {len(entries)} entries"
    titles = f"{'step':>8} {'before the end':>14} {'requests':>8} {'adapted':>7} {'new':>4} {'tokens':>6}"
    yield f"{titles} {'predicted':>10} {'took':>10}"
    ends = {entry.step_id: entry for entry in entries if isinstance(entry, flight.Completed | flight.Failed)}
    for entry in entries:
        if isinstance(entry, flight.Launched):
            yield _row(entry, ends.get(entry.step_id), facts.clock)
        elif isinstance(entry, flight.Idle):
            yield f"{'idle':>8} {entry.at - facts.clock:12.3f} s"
    for request_id, tokens in flight.in_flight(entries).items():
        yield f"in the steps at the end: {request_id}, up to its token {tokens}"


def _row(entry: flight.Launched, end: flight.Completed | flight.Failed | None, clock: float) -> str:
    tokens = sum(chunk.length for chunk in entry.chunks)
    predicted = "" if entry.predicted is None else f"{1e3 * entry.predicted:.1f} ms"
    match end:
        case flight.Completed():
            took = f"{1e3 * end.latency:.1f} ms"
        case flight.Failed():
            took = end.error
        case _:
            took = "no end"
    counts = f"{len(entry.chunks):8} {entry.adapted:7} {len(entry.started):4} {tokens:6}"
    return f"{entry.step_id:8} {entry.at - clock:12.3f} s {counts} {predicted:>10} {took:>10}"
