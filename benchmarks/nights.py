"""The end of a batch as it is forecast, on a virtual clock: does the interval hold the end, and how wide is it?

Each night has a batch of about eight hours behind two hours of earlier batch work, from which the pace is known. The
rate of batch work is steady, in waves (the chats come and go), or falls for one hour (a burst of chats); all three vary
by the minute. The forecast is the server's own (`gateway.batch.forecast`): it sees the ended lines, never the rate.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.frame import Table
from engine.client import EngineStats
from gateway.batch.forecast import Forecast
from gateway.batch.run import LineSizes
from gateway.store.objects import BatchJob, BatchStatus, Usage

HOUR, STEP = 3600.0, 20.0
LINES_PER_HOUR, LINE_BYTES, PROMPT = 400, 400.0, 100
"""Mean lines in an hour; a line has a prompt of so many tokens and a longer or shorter answer."""
HOURS, EARLIER = 8.0, 2.0
BURST = 0.3
"""Rate in the hour of a burst, of the usual one."""
SPREAD_AT = 0.2
"""Progress at which the width of the interval is measured."""
NIGHTS = Table(
    {"night": "8", "nights": "7d", "end in the interval": "20.1%", "width at 20 %, P50": "19.1%", "P90": "8.1%"}
)


def steady(_: random.Random) -> Callable[[float], float]:
    return lambda _: 1.0


def waves(chance: random.Random) -> Callable[[float], float]:
    period, phase = chance.uniform(0.3, 2.0) * HOUR, chance.uniform(0.0, 2.0 * math.pi)
    return lambda at: 1.0 - 0.7 * 0.5 * (1.0 + math.sin(2.0 * math.pi * at / period + phase))


def burst(chance: random.Random) -> Callable[[float], float]:
    start = chance.uniform(0.0, HOURS - 1.0) * HOUR
    return lambda at: BURST if start <= at < start + HOUR else 1.0


LOADS = {"steady": steady, "waves": waves, "burst": burst}


def spend(load: Callable[[random.Random], Callable[[float], float]], seed: int) -> tuple[bool, float]:
    """Run one night to its end. Return whether the interval held the end of the batch, and the width of the interval at
    SPREAD_AT of the lines, as a share of the time left."""
    chance = random.Random(seed)
    rate = load(chance)
    forecast, total = Forecast(EngineStats), round(HOURS * LINES_PER_HOUR * chance.uniform(0.5, 1.5))
    sizes = LineSizes(LINE_BYTES)
    batch = BatchJob("batch", "", "e", "f", "24h", 0, 10**9, status=BatchStatus.IN_PROGRESS, total=total)
    earlier = replace(batch, id="earlier", total=10**9)
    now, due = -EARLIER * HOUR, 0.0
    first: tuple[float, float] | None = None
    shown, at_share = (0.0, 0.0), 0.0
    while batch.remaining:
        if now >= 0.0 and first is None:
            list(forecast.update([], now))
            outlook = forecast.first(batch, round(total * LINE_BYTES), now, sizes)
            assert outlook.eta is not None
            first = outlook.eta
        job = earlier if first is None else batch
        due += rate(now) * chance.uniform(0.7, 1.3) * LINES_PER_HOUR * STEP / HOUR
        while due >= 1.0 and job.remaining:
            due -= 1.0
            usage = Usage(PROMPT, 0, chance.randrange(10, 60))
            forecast.line_ended(round(LINE_BYTES), usage)
            job = replace(job, completed=job.completed + 1, usage=job.usage.plus(usage))
        earlier, batch = (job, batch) if first is None else (earlier, job)
        now += STEP
        list(forecast.update([(job, sizes)], now))
        if not at_share and batch.completed >= SPREAD_AT * total:
            shown, at_share = forecast.outlooks["batch"].eta or shown, now
    assert first is not None
    return first[0] <= now <= first[1], (shown[1] - shown[0]) / (now - at_share)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks nights", description=__doc__)
    parser.add_argument("--nights", type=int, default=200, help="nights in all (default: 200)")
    args = parser.parse_args(argv)
    print(NIGHTS.heading)
    for number, (name, load) in enumerate(LOADS.items()):
        nights = [spend(load, seed) for seed in range(number, args.nights, len(LOADS))]
        held, widths = sum(held for held, _ in nights) / len(nights), sorted(width for _, width in nights)
        spread = widths[len(widths) // 2], widths[int(0.9 * len(widths))]
        print(NIGHTS.line(name, len(nights), held, *spread), flush=True)
