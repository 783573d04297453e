"""Batches on the virtual clock: the error of the ETA, and the makespan by learned order against the order of prefixes.

    python -m benchmarks lengths [--lines 4000] [--shape steady double sine day none] [--period 120] [--seed 1]

The batch worker of the server (store, feeder, forecast) runs on the virtual clock over the engine's core, whose steps
take the time of a latency model with noise. Lines are of three kinds with long common prefixes: a third is classified
in a few tokens, a third is summarized, where the answer grows with the text, and a third (`--essays`) is an essay of
600 tokens on average. Answer lengths are drawn per line; nothing but the finished lines tells the server of them. The
ETA is compared with that of an oracle that knows all lengths, and expects the mean pace so far for the rest. `day` is
the load of `sine` on a server for which a period is a day, and the batch begins after DAYS, so that the server expects
the load by time of day.
"""

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.experiments.machine import Machine, MachineSpec, build_machine
from engine.api import EngineRequest, RequestClass, RequestOutput, SamplingParams, TokenCosts
from engine.colocation.keeper import Colocation
from engine.colocation.waits import initial_budget
from engine.core import EngineCore
from engine.scheduling.offline import OfflinePlan, whole
from engine.scheduling.policies import find_policy
from engine.scheduling.report import report_stats
from engine.virtual import Arrival, VirtualDriver
from gateway.batch import pace
from gateway.batch.limits import BatchLimits
from gateway.batch.line import LineAnswer, LineOrigin
from gateway.batch.worker import BatchWorker
from gateway.store.clock import StoreClock
from gateway.store.folder import StateFolder, open_state
from gateway.store.objects import TERMINAL, BatchJob, FileObject, Usage, new_batch_id, new_file_id
from predictor.online import OnlineModel
from predictor.slo import SLO

ORDERS = {"rank": 0, "learned": BatchLimits().tail_lines}
SHAPES = ("steady", "double", "sine", "day", "none")
MACHINE = MachineSpec("llama-3-8b", "a100-80gb", prefix_caching=True)
OBJECTIVES = "ttft_p99=1s,tbt_p99=0.1s"
RATE = 6.0
"""Chats per second on average; a sine wave runs from nothing to twice the rate."""
CHAT = (512, 128)
DAYS, PERIODS = 3, 40
"""Periods of `day` before the batch begins, and those after which no more chats arrive."""
EPOCH = 1_000_000_000.0
"""Unix time at which the virtual clock starts."""
LOOK_SECONDS = 2.0
WINDOW = 30 * 86_400
FIRST_PROGRESS, LAST_PROGRESS = 0.2, 0.95
KINDS = ("Classify the text as good or bad. ", "Summarize the text in full sentences. ", "Write an essay on this. ")


def input_lines(count: int, essays: float, seed: int) -> tuple[bytes, dict[str, int]]:
    """Return an input file in random order of kinds, and the answer's length of each line."""
    draw, lines, lengths = random.Random(seed), list[bytes](), dict[str, int]()
    for number in range(count):
        kind = 2 if draw.random() < essays else draw.randrange(2)
        words = draw.randint(20, 300)
        mean = (4.0, 0.4 * words, 600.0)[kind]
        prompt = KINDS[kind] * 8 + " ".join(f"{draw.randrange(10**6):06d}" for _ in range(words // 2))
        lengths[str(number)] = max(1, min(1500, round(draw.gauss(mean, 0.35 * mean))))
        body = {"prompt": prompt, "max_tokens": 1500, "user": str(number)}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line).encode())
    return b"\n".join(lines) + b"\n", lengths


def chats(shape: str, period: float, seed: int) -> Iterator[Arrival]:
    """Yield chats by arrival: Poisson at RATE, at twice the RATE, or at one that follows a sine."""
    draw, at, number = random.Random(seed), 0.0, 0
    prompts = [(number,) * CHAT[0] for number in range(1, 1001)]
    while shape != "none" and at < PERIODS * period:
        at += draw.expovariate(2.0 * RATE)
        share = {"steady": 0.5, "double": 1.0}.get(shape, 0.5 - 0.5 * math.cos(2.0 * math.pi * at / period))
        if draw.random() < share:
            number += 1
            prompt = prompts[number % len(prompts)]
            yield Arrival(at, EngineRequest(f"chat-{number}", prompt, SamplingParams(max_tokens=CHAT[1])))


class VirtualServer(VirtualDriver):
    """The core on the virtual clock, with lines of the batch worker as offline requests."""

    def __init__(self, machine: Machine, arrivals: Iterable[Arrival], answers: dict[str, int], seed: int) -> None:
        believed, slo = OnlineModel(machine.predictor, machine.mape), SLO.parse(OBJECTIVES)
        self.core = EngineCore(machine.config, online_policy=find_policy("goodput"), model=believed)
        keeper = Colocation(self.core, believed, slo, initial_budget(slo, machine.predictor))
        super().__init__(self.core, machine.runner(seed), arrivals, keeper=keeper)
        self._answers = answers
        self._numbers = 0
        self.open: dict[str, asyncio.Future[RequestOutput]] = {}

    async def run_line(self, _: str, body: dict[str, Any], origin: LineOrigin) -> LineAnswer:
        """Run a line of the batch worker."""
        self._numbers += 1
        name, text = f"line-{self._numbers}", body["prompt"].encode()
        tokens = tuple(int.from_bytes(text[i : i + 4]) % 50_000 for i in range(0, len(text), 4))
        sampling = SamplingParams(max_tokens=self._answers[body["user"]])
        request = EngineRequest(
            name,
            tokens,
            sampling,
            RequestClass.OFFLINE,
            b"",
            origin.deadline,
            True,
            origin.tenant,
            origin.job,
            origin.lane,
        )
        self.open[name] = asyncio.get_running_loop().create_future()
        self._add_offline(request, self.now)
        output = await self.open[name]
        usage = Usage(output.num_prompt_tokens, output.num_cached_tokens, output.num_output_tokens)
        return LineAnswer(200, {}, usage)

    def _take(self, output: RequestOutput) -> None:
        super()._take(output)
        if output.finish_reason is not None and output.request_id in self.open:
            self.open.pop(output.request_id).set_result(output)

    def step(self) -> bool:
        """Run one step, or advance the clock to the next arrival; return False if there is nothing to do."""
        plan: OfflinePlan | None = whole(self.core.plan_offline(self.now)) if self.core.has_offline else None
        output = self.core.schedule(self.now, plan)
        if output is not None:
            self._execute(output)
            return True
        arrival = self._arrivals[0].at if self._arrivals else math.inf
        later = min(arrival, self.core.retry_at or math.inf)
        if math.isinf(later):
            return False
        self._now = max(self._now, later)
        self._arrive()
        return True


class Look(NamedTuple):
    """A batch at one time: the share of finished lines, the time and the ETA in seconds, computed prompt and output
    tokens so far, and the token costs."""

    done: float
    at: float
    eta: float | None
    tokens: tuple[int, int]
    costs: TokenCosts


@dataclass(slots=True)
class BatchRun:
    """One batch: its looks, its begin and the end of the last line in seconds, and its usage."""

    looks: list[Look] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    usage: Usage = field(default_factory=Usage)

    def errors(self) -> list[tuple[float, float]]:
        """Return (progress, error of the ETA over the time that is left) from FIRST_PROGRESS to LAST_PROGRESS."""
        return self._errors(lambda look: math.inf if look.eta is None else look.eta)

    def oracle_errors(self) -> list[tuple[float, float]]:
        """Return the errors of the mean pace so far over all tokens left."""
        computed, output = self.usage.input_tokens - self.usage.cached_tokens, self.usage.output_tokens
        return self._errors(
            lambda look: (
                self.begin + (look.at - self.begin) * look.costs.of(computed, output) / look.costs.of(*look.tokens)
            )
        )

    def _errors(self, eta: Callable[[Look], float]) -> list[tuple[float, float]]:
        looks = [look for look in self.looks if FIRST_PROGRESS <= look.done <= LAST_PROGRESS]
        return [(look.done, (eta(look) - self.end) / (self.end - look.at)) for look in looks]


async def _settle(worker: BatchWorker, server: VirtualServer) -> None:
    """Wait until the worker has stored all results and fed all lines for which there is room."""
    while True:
        jobs, window = list(worker.jobs.values()), worker.window
        fed = window.is_full or not any(job.hungry for job in jobs)
        if not any(job.unwritten for job in jobs) and fed and window.lines == len(server.open):
            return
        await asyncio.sleep(0)


async def run_batch(machine: Machine, root: Path, shape: str, args: argparse.Namespace, tail_lines: int) -> BatchRun:
    seed, (content, answers) = args.seed, input_lines(args.lines, args.essays, args.seed)
    folder = await asyncio.to_thread(open_state, root)
    server = VirtualServer(machine, chats(shape, args.period, seed), answers, seed)
    worker = BatchWorker(
        folder,
        BatchLimits(tail_lines=tail_lines),
        server.run_line,
        max_lines=lambda _: None,
        stats=lambda: report_stats(server.core.state),
        set_lane=server.core.set_lane,
        clock=StoreClock(lambda: EPOCH + server.now, lambda: server.now),
    )
    await worker.start()
    run, next_look = BatchRun(), 0.0
    while shape == "day" and server.now < DAYS * args.period and server.step():
        if server.now >= next_look:
            next_look = server.now + LOOK_SECONDS
            await worker.lanes.update()
    run.begin = server.now
    batch = await _add(folder, content, run.begin)
    worker.added(batch)
    while not worker.jobs:  # noqa: ASYNC110 - another process validates
        await asyncio.sleep(0.01)
    while worker.jobs:
        await _settle(worker, server)
        if worker.jobs and server.now >= next_look:
            next_look = server.now + LOOK_SECONDS
            await worker.lanes.update()
            _look(worker, server, run)
        if server.open:
            server.step()
            run.end = server.now
        await asyncio.sleep(0)
    while (ended := await folder.store.load_batch(batch.id)).status not in TERMINAL:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    run.usage = ended.usage
    await worker.stop()
    await folder.close()
    return run


def _look(worker: BatchWorker, server: VirtualServer, run: BatchRun) -> None:
    stats = report_stats(server.core.state)
    for job in worker.jobs.values():
        batch, outlook = job.batch, worker.forecast.outlooks.get(job.batch.id)
        eta = None if outlook is None or outlook.eta is None else outlook.eta - EPOCH
        output = batch.usage.output_tokens + stats.job_tokens.get(batch.id, 0)
        tokens = (batch.usage.input_tokens - batch.usage.cached_tokens, output)
        costs = stats.token_costs or TokenCosts()
        run.looks.append(Look(1.0 - batch.remaining / batch.total, server.now, eta, tokens, costs))


async def _add(folder: StateFolder, content: bytes, begin: float) -> BatchJob:
    temp = folder.create_temp()
    temp.write(content)
    file = FileObject(new_file_id(), "t", len(content), int(EPOCH), "in.jsonl", "batch")
    await folder.store.announce_files([file.id])
    await asyncio.to_thread(folder.publish_files, (temp, file.id))
    await folder.store.add_file(file)
    now = int(EPOCH + begin)
    batch = BatchJob(new_batch_id(), "t", "/v1/completions", file.id, "30d", now, now + WINDOW)
    return await folder.store.create_batch(batch)


def _worst(errors: Sequence[tuple[float, float]]) -> str:
    done, error = max(errors, key=lambda item: abs(item[1]), default=(0.0, math.nan))
    within = sum(abs(e) <= 0.15 for _, e in errors) / max(1, len(errors))
    return f"within 15 %: {within:.0%} of {len(errors)} looks, worst {error:+.1%} at {done:.0%} done"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks lengths", description=__doc__)
    parser.add_argument("--lines", type=int, default=4000)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--essays", type=float, default=1 / 3, help="share of lines with long answers")
    parser.add_argument("--period", type=float, default=120.0, help="seconds of a wave of `sine` and `day`")
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--looks", action="store_true", help="print each look")
    args = parser.parse_args(argv)
    machine = build_machine(MACHINE, args.seed)
    for shape in args.shape:
        pace.DAY = args.period if shape == "day" else 86_400.0
        ends = []
        for name in args.order:
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as root:
                run = asyncio.run(run_batch(machine, Path(root) / "state", shape, args, ORDERS[name]))
            ends.append(run.end - run.begin)
            cached = run.usage.cached_tokens / run.usage.input_tokens
            print(
                f"{shape}, {name} order: makespan {ends[-1]:.0f} s; ETA {_worst(run.errors())}; oracle "
                f"{_worst(run.oracle_errors())}; {cached:.1%} of prompt tokens cached "
                f"({time.perf_counter() - begin:.0f} s to run)",
                flush=True,
            )
            for look in run.looks if args.looks else ():
                left = run.end - look.at
                error = "-" if look.eta is None or not left else f"{(look.eta - run.end) / left:+.1%}"
                print(f"  {look.done:6.1%} {look.at - run.begin:8.0f} s  {error}")
        if len(ends) > 1:
            print(f"{shape}: {args.order[1]} order takes {ends[1] / ends[0] - 1.0:+.1%}", flush=True)


if __name__ == "__main__":
    main()
