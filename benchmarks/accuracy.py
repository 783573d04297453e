"""How far the load generator's figures are from the truth: a run against a server that answers by a script.

The server is a process of its own on the same machine. Printed: TTFT and TBT as measured minus the script (target:
within 2 ms), and minus the times at which the server says it wrote, which leaves what the client adds. Then the same
with a server that stalls for 2 s: a tool that waits for answers before it sends would not see it in its P99.
"""

import argparse
import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import describe
from benchmarks.scripted import STALL_SECONDS, STALL_TEXT, answer_to, serving
from loadgen import workers
from loadgen.arrivals import constant_rate, schedule
from loadgen.plan import WORDS, Plan, Windows, WordCosts
from loadgen.records import RequestRecord
from loadgen.stats import nearest_rank, stream
from loadgen.target import Target
from loadgen.traces import Content
from loadgen.workloads import fixed

Floats = NDArray[np.float64]
TIMEOUT = 5.0
TARGET_SECONDS = 0.002
EXPECTED = {"ok": "ok", "429": "http_error", "cut": "cut", "hang": "timeout"}


@dataclass(frozen=True, slots=True)
class Errors:
    """Measured minus true, seconds: of the first tokens, and of the gaps between chunks.

    The zeros between the tokens of one chunk are not counted: they would flatter the percentiles.
    """

    ttft: Floats
    tbt: Floats


def texts(count: int, seed: int, stall_at: int | None) -> tuple[str, ...]:
    """One text for each request; request `stall_at` is the one that stalls the server."""
    dice = stream(seed, "text")
    found = [f"request {number} {dice.integers(1 << 40)}" for number in range(count)]
    if stall_at is not None:
        found[stall_at] = STALL_TEXT + found[stall_at]
    return tuple(found)


def make_plan(url: str, prompts: Sequence[str], rate: float, seed: int) -> Plan:
    """Poisson arrivals, one request for each text."""
    times = schedule(constant_rate(rate), "poisson", stream(seed, "arrivals"), count=len(prompts))
    shape = fixed(len(prompts), 8, 100).at(times)
    content = tuple(Content(text=text) for text in prompts)
    return Plan(
        target=Target(url, endpoint="/v1/chat/completions", model="scripted", timeout=TIMEOUT),
        online=type(shape)(shape.arrived_at, shape.input_tokens, shape.output_tokens, content, span=shape.span),
        windows=Windows(horizon=float(times[-1]), drain=TIMEOUT + 1.0),
        source=WordCosts(WORDS, (1,) * len(WORDS)),
        seed=seed,
    )


def true_times(prompts: Sequence[str], arrived: Sequence[float]) -> list[list[float]]:
    """When every chunk with tokens should arrive, for requests that arrive at `arrived`; a stall holds all back."""
    begin = next((at for text, at in zip(prompts, arrived, strict=True) if text.startswith(STALL_TEXT)), None)

    def held(at: float) -> float:
        return at if begin is None or not begin <= at < begin + STALL_SECONDS else begin + STALL_SECONDS

    pairs = zip(prompts, arrived, strict=True)
    return [[held(at + offset) for offset, _ in answer_to(text).chunks] for text, at in pairs]


def against(records: Sequence[RequestRecord], truth: Sequence[Sequence[float]]) -> Errors:
    """What was measured minus `truth` (chunk times on the clock of `scheduled_at`), over the answers that are whole."""
    ttft, tbt = [], [np.empty(0)]
    for record in records:
        if not record.ok:
            continue
        times = truth[record.index]
        ttft.append((record.ttft or 0.0) - (times[0] - record.scheduled_at))
        tbt.append(np.diff(record.chunk_at) - np.diff(times))
    return Errors(np.array(ttft), np.concatenate(tbt))


def written(records: Sequence[RequestRecord], prompts: Sequence[str], stamps: dict[str, list[float]]) -> Errors:
    """What was measured minus what the server wrote: TTFT from the sending, on the server from the arrival."""
    ttft, tbt = [], [np.empty(0)]
    for record in records:
        if not record.ok:
            continue
        arrived, *times = stamps[prompts[record.index]]
        ttft.append((record.ttft_sent or 0.0) - (times[0] - arrived))
        tbt.append(np.diff(record.chunk_at) - np.diff(times))
    return Errors(np.array(ttft), np.concatenate(tbt))


def wrong_outcomes(records: Sequence[RequestRecord], prompts: Sequence[str]) -> list[str]:
    """Requests that were not recorded as they were answered: a wrong outcome or another number of tokens."""
    found = []
    for record in records:
        answer = answer_to(prompts[record.index])
        counts = [count for _, count in answer.chunks[: {"ok": None, "429": 0}.get(answer.kind, 1)]]
        tokens = np.diff([0, *counts]).tolist()
        if record.outcome != EXPECTED[answer.kind] or record.chunk_tokens != tokens:
            found.append(f"request {record.index}: {answer.kind} recorded as {record.outcome} {record.chunk_tokens}")
    return found


def run(count: int, rate: float, seed: int, stall_at: int | None) -> tuple[list[RequestRecord], Errors, Errors, Floats]:
    """One run: its records, their errors against the script and against the server's stamps, and the true TTFTs."""
    prompts = texts(count, seed, stall_at)
    with serving() as url:
        plan = make_plan(url, prompts, rate, seed)
        records = workers.execute(plan, 1, lambda _: None).requests
        with urllib.request.urlopen(f"{url}/written") as answer:
            stamps = json.load(answer)
    for problem in wrong_outcomes(records, prompts):
        print(f"  WRONG {problem}")
    assert plan.online is not None
    arrived = [float(at) for at in plan.online.arrived_at]
    truth = true_times(prompts, arrived)
    first = [truth[record.index][0] - arrived[record.index] for record in records if record.ok]
    return records, against(records, truth), written(records, prompts, stamps), np.array(first)


def show(title: str, errors: Errors) -> None:
    """P50, P99 and maximum of the absolute errors, in milliseconds."""
    for name, values in (("TTFT", errors.ttft), ("TBT", errors.tbt)):
        size = np.abs(values) * 1e3
        cells = " ".join(f"{value:8.3f}" for value in (nearest_rank(size, 50), nearest_rank(size, 99), size.max()))
        share = float((size <= TARGET_SECONDS * 1e3).mean())
        print(f"  {name:5}{title:34}{cells}   {share:7.2%} within 2 ms, n {size.size}")


def main(argv: list[str] | None = None) -> None:
    """Both runs, printed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(f"accuracy: {args.requests} requests at {args.rate:g}/s against a scripted server; {describe()}", flush=True)
    for title, stall_at in (("steady", None), (f"with a stall of {STALL_SECONDS:g} s", args.requests // 3)):
        records, script, server, first = run(args.requests, args.rate, args.seed, stall_at)
        done = [record for record in records if record.ok]
        print(f"{title}: {len(done)} whole answers, error in ms:{'':11}P50      P99      max")
        show("measured - script", script)
        show("measured - written by the server", server)
        measured = nearest_rank([record.ttft or 0.0 for record in done], 99)
        print(f"  P99 TTFT {measured * 1e3:.1f} ms, by the script {nearest_rank(first, 99) * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
