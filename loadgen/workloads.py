"""The named workloads: online arrivals and lengths, offline jobs, and how long to run.

A workload is a function of its options alone (seed included). It reads the public data sets from a folder given by path
and says in its notes when it had to fall back on a synthetic generator. Knows nothing of servers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from loadgen import lengths, traces
from loadgen.arrivals import Process, RateCurve, constant_rate, schedule
from loadgen.errors import InputError
from loadgen.plan import Job, OfflineMode
from loadgen.randomness import stream
from loadgen.traces import Content, Trace


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a workload; None selects the default of the workload.

    `rate` requests/s (inf: closed loop), `duration` seconds, `count` online requests; `curve` overrides `rate`.
    `input_tokens`/`output_tokens` (+ shared `prefix_tokens`, spread ± `range_ratio`) are the lengths of `random`.
    """

    rate: float | None = None
    duration: float | None = None
    count: int | None = None
    process: Process = "poisson"
    cv: float = 1.0
    curve: RateCurve | None = None
    seed: int = 0
    data: Path | None = None
    trace: Trace | None = None
    trace_ops: str = ""
    rate_by: str = "thin"
    input_tokens: int = 1024
    output_tokens: int = 128
    prefix_tokens: int = 0
    range_ratio: float = 0.0
    offline_lines: int | None = None
    offline_trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What to send. `online` has absolute times unless `closed_loop`; `horizon` is where its schedule ends."""

    name: str
    online: Trace | None = None
    jobs: tuple[Job, ...] = ()
    closed_loop: bool = False
    horizon: float | None = None
    offline_mode: OfflineMode = "batch"
    wait_offline: bool = False
    notes: tuple[str, ...] = field(default=())


Builder = Callable[[Options], Workload]


def build(name: str, options: Options) -> Workload:
    """The workload called `name`; raises InputError for an unknown name or options it cannot use."""
    if name not in WORKLOADS:
        raise InputError(f"unknown workload {name!r}: use {', '.join(WORKLOADS)}")
    made = WORKLOADS[name](options)
    if options.offline_trace is not None:
        lines = options.offline_trace.at(np.zeros(options.offline_lines or len(options.offline_trace)))
        made = replace(made, jobs=(Job(lines),))
    made = replace(made, jobs=tuple(job for job in made.jobs if len(job.lines)))
    offline = {note for job in made.jobs for note in job.lines.notes}
    notes = (*(made.online.notes if made.online else ()), *sorted(offline), *made.notes)
    return replace(made, name=name, notes=notes)


def timed(options: Options, shape: Trace, rate: float, count: int | None = None) -> Workload:
    """`shape`'s lengths at the arrivals the options ask for: `rate` and `count` are the workload's own values."""
    count = options.count if options.count is not None or options.duration is not None else count
    rate = options.rate if options.rate is not None else rate
    if options.curve is None and np.isinf(rate):
        return Workload("", shape.at(np.zeros(count if count is not None else len(shape))), closed_loop=True)
    curve = options.curve or constant_rate(rate)
    random = stream(options.seed, "arrivals")
    times = schedule(curve, options.process, random, count=count, duration=options.duration, cv=options.cv)
    if len(times) == 0:
        raise InputError("no request arrives in this duration at this rate")
    # A single request at time 0 has no schedule to speak of: the run is measured to its end.
    horizon = options.duration if options.duration is not None else float(times[-1]) or None
    return Workload("", shape.at(times), horizon=horizon)


def replayed(options: Options, trace: Trace, rate: float | None, by: str | None = None) -> Workload:
    """A trace's own arrivals: operators first, then thinned (or stretched) to the rate, then cut to the duration."""
    trace = traces.apply(trace, options.trace_ops, options.seed)
    if not trace.timed:
        return timed(options, trace, rate or 1.0, len(trace))
    rate = options.rate if options.rate is not None else rate
    if rate is not None and np.isinf(rate):
        return Workload("", trace, closed_loop=True)
    if rate is not None:
        trace = traces.to_rate(trace, rate, options.seed, by or options.rate_by).noted(
            f"{by or options.rate_by}={rate:g}/s"
        )
    if options.duration is not None:
        trace = traces.window(trace, 0.0, options.duration)
    if options.count is not None and options.count < len(trace):
        trace = trace.take(np.arange(options.count, dtype=np.int64))
        trace = replace(trace, span=float(trace.arrived_at[-1]) if len(trace) else 0.0)
    if len(trace) == 0:
        raise InputError("no request of the trace is left")
    return Workload("", trace, horizon=trace.span or None)


def fixed(count: int, inputs: int, outputs: int) -> Trace:
    """`count` requests of one size, without times."""
    return Trace(np.zeros(count), np.full(count, inputs, np.int64), np.full(count, outputs, np.int64), timed=False)


def job_of(options: Options, source: lengths.Lengths, default: int) -> tuple[Job, ...]:
    """One job with the lengths of a data set."""
    count = default if options.offline_lines is None else options.offline_lines
    return (Job(lengths.sample(source, count, options.seed, options.data, "offline")),) if count else ()


def _random(options: Options) -> Workload:
    """Sizes around `input_tokens` and `output_tokens`, as vLLM's random data set."""
    count = options.count or 1000
    random = stream(options.seed, "lengths")

    def sizes(mean: int) -> traces.Ints:
        low, high = int(mean * (1 - options.range_ratio)), int(mean * (1 + options.range_ratio))
        drawn: traces.Ints = random.integers(max(1, low), max(1, high) + 1, count)
        return drawn

    inputs = sizes(options.input_tokens) + options.prefix_tokens
    content = (Content(segments=((0, options.prefix_tokens),)),) * count if options.prefix_tokens else ()
    shape = Trace(np.zeros(count), inputs, sizes(options.output_tokens), content, timed=False)
    lines = options.offline_lines or 0
    jobs = (Job(fixed(lines, options.input_tokens, options.output_tokens)),) if lines else ()
    return replace(timed(options, shape, np.inf, count), jobs=jobs)


def _trace(options: Options) -> Workload:
    """A trace file given with --trace."""
    if options.trace is None:
        raise InputError("the workload `trace` needs --trace FILE")
    return replace(replayed(options, options.trace, None), jobs=job_of(options, lengths.ARXIV, 0))


def _tiny(options: Options) -> Workload:
    """20 requests and a job of 20 lines: a smoke test for a CPU."""
    made = timed(options, fixed(20, 48, 12), 4.0, 20)
    jobs = (Job(fixed(20 if options.offline_lines is None else options.offline_lines, 48, 12)),)
    return replace(made, jobs=jobs, wait_offline=True)


def _hygen(options: Options) -> Workload:
    """Azure conversations thinned to a rate, beside arXiv summaries."""
    made = replayed(options, lengths.arrivals(lengths.AZURE_CONV, options.seed, options.data), 1.0)
    return replace(made, jobs=job_of(options, lengths.ARXIV, 2000))


def _apt(source: lengths.Lengths) -> Builder:
    def make(options: Options) -> Workload:
        shape = lengths.sample(source, options.count or 4096, options.seed, options.data, "online")
        return replace(timed(options, shape, 1.0, 300), jobs=job_of(options, lengths.ARXIV, 0))

    return make


def _larry(source: lengths.Lengths) -> Builder:
    def make(options: Options) -> Workload:
        trace = lengths.arrivals(source, options.seed, options.data)
        return replace(replayed(options, trace, 1.0, by="stretch"), jobs=job_of(options, lengths.ARXIV, 2000))

    return make


def _burst(source: lengths.Lengths) -> Builder:
    def make(options: Options) -> Workload:
        made = replayed(options, lengths.arrivals(source, options.seed, options.data), None)
        return replace(made, jobs=job_of(options, lengths.ARXIV, 2000))

    return make


def _llmd(options: Options) -> Workload:
    """90 s at 15 requests/s and 90 s at 1 request/s, 512 in and 128 out, beside three jobs of 1,000 lines."""
    curve = RateCurve(np.array([90.0, 90.0]), np.array([15.0, 1.0]))
    if options.rate is not None:
        curve = curve.scaled(options.rate)
    asked = replace(options, curve=options.curve or curve, rate=None)
    if asked.duration is None and asked.count is None:
        asked = replace(asked, duration=180.0)
    lines = 1000 if options.offline_lines is None else options.offline_lines
    jobs = (Job(fixed(lines, 512, 128)),) * 3 if lines else ()
    return replace(timed(asked, fixed(1, 512, 128), 8.0), jobs=jobs)


def _prefix_batch(options: Options) -> Workload:
    """10,000 lines in groups of 100 that share 768 of 896 prompt tokens, in random order; 64 tokens out."""
    lines = 10_000 if options.offline_lines is None else options.offline_lines
    groups = stream(options.seed, "lengths").permutation(lines) // 100
    content = tuple(Content(segments=((int(group), 768),)) for group in groups)
    return Workload("", jobs=(Job(replace(fixed(lines, 896, 64), content=content)),), horizon=options.duration)


def _multiturn(options: Options) -> Workload:
    """Conversations whose next turn repeats the last one (question and answer) as its prefix."""
    turns, think = 4, 20.0
    wanted = options.count or 200
    rate = options.rate or 1.0
    random = stream(options.seed, "lengths")
    count = -(-wanted // turns)
    starts = schedule(
        options.curve or constant_rate(rate / turns),
        options.process,
        stream(options.seed, "arrivals"),
        count=count,
        cv=options.cv,
    )
    times, inputs, outputs, content = [], [], [], []
    for conversation, start in enumerate(starts):
        segments: list[traces.Segment] = []
        when = float(start)
        for turn in range(turns):
            answer = int(random.integers(50, 300))
            segments.append((conversation * 2 * turns + 2 * turn, int(random.integers(50, 400))))
            times.append(when)
            inputs.append(sum(size for _, size in segments))
            outputs.append(answer)
            content.append(Content(segments=tuple(segments)))
            segments.append((conversation * 2 * turns + 2 * turn + 1, answer))
            when += think * (0.5 + float(random.exponential(0.5)))
    trace = traces.build(np.array(times), np.array(inputs), np.array(outputs), tuple(content))
    made = replayed(replace(options, rate=None, count=wanted, trace_ops=""), trace, None)
    notes = ("SYNTHETIC conversations of 4 turns; the previous answer is repeated as made-up text of its length",)
    return replace(made, jobs=job_of(options, lengths.ARXIV, 0), notes=notes)


def _gen_batch(options: Options) -> Workload:
    """Short prompts, long answers (75 in, 1,960 out on average)."""
    return Workload("", jobs=job_of(options, lengths.GENERATION, 160), horizon=options.duration)


def _score_batch(options: Options) -> Workload:
    """Longer prompts, very short answers (707 in, 5 out on average)."""
    lines = 1000 if options.offline_lines is None else options.offline_lines
    random = stream(options.seed, "lengths")
    spread = 0.6
    inputs = np.maximum(1, np.rint(random.lognormal(np.log(707) - spread**2 / 2, spread, lines))).astype(np.int64)
    outputs = 1 + random.poisson(4.0, lines).astype(np.int64)
    trace = traces.build(None, inputs, outputs, notes=("offline lengths: SYNTHETIC, means 707 in and 5 out",))
    return Workload("", jobs=(Job(trace),), horizon=options.duration)


WORKLOADS: dict[str, Builder] = {
    "random": _random,
    "trace": _trace,
    "tiny": _tiny,
    "hygen": _hygen,
    "apt-chat": _apt(lengths.SHAREGPT),
    "apt-code": _apt(lengths.HUMANEVAL),
    "apt-sum": _apt(lengths.ARXIV),
    "larry-chat": _larry(lengths.AZURE_CONV),
    "larry-code": _larry(lengths.AZURE_CODE),
    "burst": _burst(lengths.AZURE_CODE),
    "burst-rise": _burst(lengths.SERVEGEN),
    "llmd-491": _llmd,
    "prefix-batch": _prefix_batch,
    "chat-multiturn": _multiturn,
    "gen-batch": _gen_batch,
    "score-batch": _score_batch,
}


def clipped(workload: Workload, scale: float, limit: int | None) -> Workload:
    """The workload with lengths scaled and then cut so that prompt and answer fit a context of `limit` tokens."""
    notes = list(workload.notes)
    if scale != 1.0:
        notes.append(f"lengths scaled by {scale:g}")
    cut = 0

    def change(trace: Trace) -> Trace:
        nonlocal cut
        trace = traces.scale(trace, scale) if scale != 1.0 else trace
        if limit is None:
            return trace
        outputs = np.minimum(trace.output_tokens, max(1, limit // 2))
        inputs = np.minimum(trace.input_tokens, limit - outputs)
        cut += int(((inputs != trace.input_tokens) | (outputs != trace.output_tokens)).sum())
        return replace(trace, input_tokens=inputs, output_tokens=outputs)

    online = change(workload.online) if workload.online is not None else None
    jobs = tuple(replace(job, lines=change(job.lines)) for job in workload.jobs)
    if cut:
        notes.append(f"{cut} requests cut to fit {limit} tokens")
    return replace(workload, online=online, jobs=jobs, notes=tuple(notes))
