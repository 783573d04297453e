"""Recorded scheduling decisions: 240 seeded workloads, each a sequence of `SchedulerOutput`s written as text.

`python tests/golden_steps.py --write` records them; `--show N` prints the steps of workload N, to compare two commits.
The text holds tokens, rows, units and their order, but no class and no field name: a change of the scheduler's types
leaves it as it is, a change of a decision does not.
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from driver import Driver, make_request
from fakes.runner import FakeRunner

from engine.api import EngineRequest, Lane, RequestClass
from engine.cache.blocks import CacheEntry
from engine.limits import UNLIMITED_QUEUE, SchedulerConfig
from engine.scheduling.objective import StepObjective
from engine.scheduling.output import SchedulerOutput
from predictor.budget import BudgetParams
from predictor.model import LatencyModel

FILE = Path(__file__).with_name("golden_steps.json")
COUNT = 240
BLOCK = 4
VOCAB = 64
MAX_STEPS = 6_000
POLICIES = ("goodput", "fcfs", "apt", "goodput-strict", "larry", "no-preempt")
OFFLINE_POLICIES = ("psm", "deadline", "fcfs")
MODELS = (
    LatencyModel(intercept=0.008, decodes=2e-4, prefill_tokens=4e-4, attention=1e-6, prefill_chunks=5e-4),
    LatencyModel(
        intercept=0.01, decodes=1e-3, prefill_tokens=1e-3, attention=4e-5, transferred=1.3e-3, restored=1e-4,
        compact=1e-4, decode_context=2e-6,
    ),
    None,
)  # fmt: skip
BUDGETS = (
    BudgetParams("hygen", 0.03),
    BudgetParams("tidemill", 0.05, lam=4.0, delta=4.0, rule="tbt_p99"),
    BudgetParams("tidemill", 0.04, lam=1.0, delta=2.0, rule="tbt_mean"),
)


def sequence(number: int) -> Iterator[str]:
    """Yield one line per step of workload `number`, 0 to COUNT - 1."""
    rng = random.Random(number)
    driver = _driver(number, rng)
    arrivals = sorted(
        (
            (rng.uniform(0.0, 1.5), _request(rng, index, 0.2 if number % 5 > 2 else 0.55))
            for index in range(rng.randint(8, 40))
        ),
        key=_time,
    )
    aborts = {request.request_id for _, request in arrivals if rng.random() < 0.08}
    for _ in range(MAX_STEPS):
        while arrivals and arrivals[0][0] <= driver.now:
            driver.add(arrivals.pop(0)[1])
        seen = len(driver.steps)
        if driver.step():
            yield from map(line, driver.steps[seen:])
        elif arrivals:
            driver.now = max(driver.now, arrivals[0][0])
        else:
            break
        if aborts and len(driver.steps) % 5 == 0 and (running := sorted(aborts & set(driver.outputs))):
            aborts.remove(running[0])
            driver.abort(running[0])
    assert not driver.core.has_requests, f"workload {number} did not end"


def line(output: SchedulerOutput) -> str:
    """Write a step: released rows, new requests, block tables, cache operations, chunks."""
    parts = ["-" + ",".join(map(str, output.released_rows))]
    for new in output.new_requests:
        digest = sha256(str(new.token_ids).encode()).hexdigest()[:6]
        parts.append(f"+{new.row}={new.request_id}/{len(new.token_ids)}/{digest}/{_entries(new.entries)}")
    parts += [f"a{row}/{_entries(entries)}" for row, entries in output.appended]
    parts += [f"r{row}/{block}/{_entries((entry,))}" for row, block, entry in output.replaced]
    for op in output.operations:
        parts.append(f"o{op.action.value}/{_entries((op.source,))}>{_entries((op.target,))}@{op.start}")
    parts += [f"{c.row}:{c.start}+{c.length}{'!' * c.sample}" for c in output.chunks]
    return " ".join(parts)


def _entries(entries: Iterable[CacheEntry]) -> str:
    """Write block table entries as kind, tier and units: `kvd3.4` is K and V on the device in units 3 and 4."""
    return ",".join(f"{e.kind.value}{e.tier.value[0]}{'.'.join(map(str, e.units))}" for e in entries)


def record(numbers: Iterable[int] = range(COUNT)) -> list[dict[str, Any]]:
    """Run workloads; return a row for each: its number of steps and the digest of its lines."""
    return [_row(number) for number in numbers]


def _row(number: int) -> dict[str, Any]:
    lines = list(sequence(number))
    return {"workload": number, "steps": len(lines), "digest": sha256("\n".join(lines).encode()).hexdigest()[:32]}


def _time(arrival: tuple[float, EngineRequest]) -> float:
    return arrival[0]


def _driver(number: int, rng: random.Random) -> Driver:
    """A core of the tier, policy, depth and objective that the number names; sizes are drawn."""
    model = MODELS[number % len(MODELS)]
    host = (0, 0, 60, 200)[number % 4]
    scratch = (0, 0, 0, 6, 20)[number % 5]
    window = 3 * BLOCK if number % 11 == 0 and not scratch and not host else 0
    rows = rng.randint(3, 12)
    num_blocks = rng.randint(31, 45) if scratch else rng.randint(40, 90)
    config = SchedulerConfig(
        num_units=2 * num_blocks,
        max_model_len=30 * BLOCK,
        block_size=BLOCK,
        max_num_seqs=rows,
        max_num_batched_tokens=rng.choice((16, 32, 96)),
        enable_prefix_caching=number % 7 != 0,
        pipeline_depth=number % 2,
        max_queue_time=UNLIMITED_QUEUE,
        host_units=host,
        unit_bytes=1,
        scratch_blocks=scratch,
        window=window,
        min_prefill_chunk=8,
        seed=number,
    )
    runner = FakeRunner(block_size=BLOCK, vocab_size=VOCAB, scratch_blocks=scratch, host_units=host, window=window)
    if number % 13 == 0:
        runner.fail_steps = frozenset({rng.randint(3, 30)})
    objective = None
    if model is not None:
        budget = BUDGETS[number % len(BUDGETS)]
        idle = min(0.05, budget.latency_budget)
        objective = StepObjective(rng.choice((0.2, 0.6)), rng.choice((0.03, 0.06)), budget=budget, idle=idle)
    return Driver(
        runner,
        config,
        online_policy=POLICIES[number % len(POLICIES)],
        offline_policy=OFFLINE_POLICIES[number // 2 % len(OFFLINE_POLICIES)],
        model=model,
        objective=objective,
        check_every=MAX_STEPS,
    )


def _request(rng: random.Random, index: int, offline_share: float) -> EngineRequest:
    offline = rng.random() < offline_share
    prefix = [7] * rng.choice((0, 0, 9, 17))
    prompt = [*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60)))]
    return make_request(
        f"{'f' if offline else 'n'}{index}",
        prompt,
        rng.randint(1, 40),
        request_class=RequestClass.OFFLINE if offline else RequestClass.ONLINE,
        tenant=rng.choice(("", "", "a", "b")),
        lane=rng.choice((Lane.BATCH, Lane.BATCH, Lane.FLEX, Lane.AT_RISK)) if offline else Lane.BATCH,
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, record())) + "\n]\n")
    else:
        print("\n".join(sequence(int(sys.argv[sys.argv.index("--show") + 1]))))
