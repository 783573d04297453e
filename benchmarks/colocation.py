"""Co-location, live: the same online arrivals alone, beside offline work that competes, and beside ours.

Five arms, three seeds: (1) online only, (2) offline only, (3) naive mix - offline requests are sent with the same
priority -, (4) ours: they have `service_tier: "flex"`, (5) the offline side is one real batch job, a JSONL file
through /v1/files and /v1/batches. Online requests are judged by their TTFT from the scheduled arrival and the
nearest-rank P99 of their own gaps, pooled over the seeds and paired by request between arms. Every arm has a server of
its own; its first seconds do not count. With `--slo 5%` the server promises a tolerance instead of the limits. The
excess of TTFT and gaps over those alone is printed by pairs of requests; the arm "online again" shows its noise. With
`--one-server` the arms take turns on one server, so that a machine whose speed changes within minutes favours none.
`--plot FILE.svg` makes one run with a sine-shaped online load instead and draws it.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from statistics import mean, stdev

from benchmarks.colocation_plot import draw
from benchmarks.figures import percentile
from benchmarks.frame import Table
from benchmarks.gpu.setup import SHAPES
from benchmarks.live import CONFIG, make_model_folder, server
from benchmarks.loads import (
    JOB,
    JOB_TOKENS_PER_SECOND,
    OFFLINE_OUTPUT,
    OFFLINE_PROMPT,
    ONLINE_OUTPUT,
    ONLINE_PROMPT,
    OUTSTANDING,
    SMALL,
    WARM_UP,
    Run,
    judged,
    learn,
    paired_bound,
    poisson,
    run_alone,
    slo_of,
    split_of,
)
from benchmarks.machine import describe
from loadgen import arrivals as processes
from loadgen.arrivals import constant_rate

_IDS = {"torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
TIERS = {
    "online only": None,
    "online again": None,
    "offline only": "flex",
    "naive mix": "default",
    "tidemill": "flex",
    "batch job": JOB,
}
"""The arms: how their offline work comes, None for without."""
ARMS = tuple(name for name in TIERS if name != "online again")
"""The default arms."""

TABLE = Table({
    "arm": "14", "online": "7d", "TTFT P50": "9.0f", "P99 ms": "9.0f", "TBT P50": "9.1f", "TBT P99": "9.1f",
    "attainment": "11.1%", "lines/s": "8.2f", "output tok/s": ".0f", "prompt tok/s": ".0f",
})  # fmt: skip


def summarise(name: str, runs: list[Run], ttft: float, tbt: float) -> None:
    answers = judged(runs)
    ttfts = [answer.ttft for answer in answers if answer.ttft is not None]
    gaps = [gap for answer in answers for gap in answer.gaps()]
    good = mean(map(slo_of(ttft, tbt).good, answers)) if answers else math.nan
    times = [percentile(values, rank) * 1e3 for values in (ttfts, gaps) for rank in (50, 99)]
    lines = mean(run.offline_lines for run in runs)
    print(TABLE.line(name, len(answers), *times, good, lines, *split_of(lines)), flush=True)


def compare(serve: Callable[[], AbstractContextManager[str]], args: argparse.Namespace) -> None:
    rate = args.rate
    settings, learning = {"outstanding": args.outstanding, "job_rate": args.job_rate}, args.learning
    arms: dict[str, list[Run]] = {name: [] for name in args.arms}
    with ExitStack() as shared:
        if args.one_server:
            url = shared.enter_context(serve())
            learn(url, rate, learning, **settings)
            serve, learning = lambda: nullcontext(url), 0.0
        for seed in range(1, args.seeds + 1):
            arrivals = poisson(constant_rate(rate), args.seconds, seed)
            for name in arms if seed % 2 else reversed(arms):
                online = [] if name == "offline only" else arrivals
                run = run_alone(serve, rate, online, args.seconds, TIERS[name], seed, learning, **settings)
                arms[name].append(run)
                summarise(f"  {name} {seed}", [run], args.ttft, args.tbt)
    print(TABLE.heading)
    for name, runs in arms.items():
        summarise(name, runs, args.ttft, args.tbt)
    alone = arms.get("online only", [])
    for name in ("online again", "naive mix", "tidemill", "batch job"):
        if name in arms and alone:
            for line in interference(name, arms[name], alone):
                print(line)
    for name, beside in (("tidemill", "offline work"), ("batch job", "a batch job")):
        if name in arms and alone:
            change, lower = paired_bound(arms[name], alone, args.ttft, args.tbt)
            print(f"attainment beside {beside} - alone: {change:+.2%}, lower 95 % bound {lower:+.2%}")
            if "offline only" in arms:
                print_harvest(arms["offline only"], arms[name], rate)


def interference(name: str, ours: list[Run], alone: list[Run]) -> Iterator[str]:
    """Yield the excess of TTFT and gaps over those of the same requests alone, and the time of offline work beside.

    Means have a 95 % interval over the pairs of requests; P99 is pooled.
    """
    pairs = [
        (a, b)
        for left, right in zip(ours, alone, strict=True)
        for a, b in zip(left.online, right.online, strict=True)
        if a.scheduled_at >= WARM_UP and a.ttft is not None and b.ttft is not None and a.gaps().size and b.gaps().size
    ]
    if len(pairs) < 2:
        return
    values = {
        "TTFT": [([a.ttft or 0.0], [b.ttft or 0.0]) for a, b in pairs],
        "TBT": [(list(a.gaps()), list(b.gaps())) for a, b in pairs],
    }
    for metric, found in values.items():
        base = mean(mean(theirs) for _, theirs in found)
        excesses = [(mean(mine) - mean(theirs)) / base for mine, theirs in found]
        spread = 1.96 * stdev(excesses) / math.sqrt(len(excesses))
        tails = [percentile([value for each in found for value in each[side]], 99) for side in (0, 1)]
        change = f"mean {metric} {mean(excesses):+.1%} ± {spread:.1%}, P99 {tails[0] / tails[1] - 1.0:+.1%}"
        yield f"{name}, {len(pairs)} pairs: {change}"
    used, seconds = sum(run.beside for run in ours), sum(run.seconds for run in ours)
    yield f"{name}: {used:.1f} of {seconds:.0f} s are offline work in steps with chats"


def print_harvest(alone: list[Run], mixed: list[Run], rate: float) -> None:
    """Print the offline tokens/s beside online work as a share of the capacity that the online work leaves.

    All figures count prompt and output tokens.
    """
    most, got = (mean(run.offline_rate for run in runs) for runs in (alone, mixed))
    online = rate * (ONLINE_PROMPT + ONLINE_OUTPUT)
    left = most - online
    print(f"left over: {most:.0f} offline only - {online:.0f} online = {left:.0f} tok/s, prompts counted")
    print(f"harvested {got / left:.0%}")


def arms_of(text: str) -> tuple[str, ...]:
    """Names of arms, separated by commas, in the order in which they run."""
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in TIERS]:
        raise argparse.ArgumentTypeError(f"no such arm: {', '.join(unknown)} (there are {', '.join(TIERS)})")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks colocation", description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=75.0, help="length of one arm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=1.0, help="TTFT limit in seconds")
    parser.add_argument("--tbt", type=float, default=0.1, help="limit on the P99 of a request's gaps in seconds")
    parser.add_argument("--model", default=SMALL, choices=(SMALL, *SHAPES), help="shape of the random model")
    parser.add_argument("--outstanding", type=int, help=f"offline clients (default: {OUTSTANDING})")
    parser.add_argument(
        "--job-rate", type=float, help=f"tokens/s for which a job has lines (default: {JOB_TOKENS_PER_SECOND:,})"
    )
    parser.add_argument(
        "--arms", type=arms_of, default=ARMS, help=f"some of {', '.join(TIERS)} (default: {', '.join(ARMS)})"
    )
    parser.add_argument("--slo", help="the server's promise, such as 5%% (default: the limits of --ttft and --tbt)")
    parser.add_argument("--learning", type=float, help="seconds of load before each arm; a tolerance needs about 180")
    parser.add_argument("--one-server", action="store_true", help="all arms and seeds on one server, in turns")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw a run with a sine-shaped online load")
    args = parser.parse_args(argv)
    if args.job_rate is not None and args.job_rate <= 0.0:
        parser.error("--job-rate must be positive; --arms selects arms without offline work")
    slo = args.slo or f"ttft_p99={args.ttft * 1e3:g}ms,tbt_p99={args.tbt * 1e3:g}ms"
    print(
        f"co-location: random {args.model}, SLO {slo}, {args.rate} online requests/s of "
        f"{ONLINE_PROMPT}/{ONLINE_OUTPUT}, {args.outstanding or OUTSTANDING} offline clients of "
        f"{OFFLINE_PROMPT}/{OFFLINE_OUTPUT}; {describe()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder, CONFIG if args.model == SMALL else SHAPES[args.model] | _IDS)
        flags = ("--slo", slo)

        def serve() -> AbstractContextManager[str]:
            return server(folder, 0, *flags, "--state-dir", str(folder / "state"))

        if args.plot is None:
            compare(serve, args)
            return
        curve = processes.sine(args.rate, args.rate, args.seconds / 3)
        settings = {"outstanding": args.outstanding, "job_rate": args.job_rate}
        run = run_alone(serve, args.rate, poisson(curve, args.seconds, 1), args.seconds, "flex", 1, **settings)
        print(TABLE.heading)
        summarise("sine", [run], args.ttft, args.tbt)
        args.plot.write_text(draw(run, args.ttft, args.tbt))


if __name__ == "__main__":
    main()
