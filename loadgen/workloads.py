"""The named workloads: online arrivals and lengths, offline jobs, and duration.

A workload is a function of its options, including the seed. It reads public data sets from a folder; its notes say
where a synthetic generator replaced a missing data set.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from loadgen import InputError, lengths, traces
from loadgen.arrivals import Process, RateCurve, constant_rate, schedule
from loadgen.plan import Job
from loadgen.stats import stream
from loadgen.traces import Content, Trace


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a workload; None leaves the choice to the workload."""

    rate: float | None = None  # requests/s; inf: closed loop
    duration: float | None = None  # seconds
    count: int | None = None  # online requests
    process: Process = "poisson"
    cv: float = 1.0
    curve: RateCurve | None = None  # overrides `rate`
    seed: int = 0
    data: Path | None = None
    trace: Trace | None = None
    trace_ops: str = ""
    rate_by: str = "thin"
    input_tokens: int = 1024  # mean lengths of `random`
    output_tokens: int = 128
    prefix_tokens: int = 0  # shared prefix of `random`, in addition to `input_tokens`
    range_ratio: float = 0.0  # relative spread of the lengths of `random`
    offline_lines: int | None = None
    offline_trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Online requests and batch jobs of a run."""

    name: str
    online: Trace | None = None  # absolute times unless `closed_loop`
    jobs: tuple[Job, ...] = ()
    closed_loop: bool = False
    horizon: float | None = None  # end of the online schedule, seconds
    wait_offline: bool = False
    notes: tuple[str, ...] = field(default=())


Builder = Callable[[Options], Workload]


def build(name: str, options: Options) -> Workload:
    """Build the workload `name`. Raise InputError for an unknown name or invalid options."""
    if name not in WORKLOADS:
        raise InputError(f"unknown workload {name!r}; use {', '.join(WORKLOADS)}")
    made = WORKLOADS[name](options)
    if options.offline_trace is not None:
        lines = options.offline_trace.at(np.zeros(options.offline_lines or len(options.offline_trace)))
        made = replace(made, jobs=(Job(lines),))
    made = replace(made, jobs=tuple(job for job in made.jobs if len(job.lines)))
    offline = {note for job in made.jobs for note in job.lines.notes}
    notes = (*(made.online.notes if made.online else ()), *sorted(offline), *made.notes)
    return replace(made, name=name, notes=notes)


def timed(options: Options, shape: Trace, rate: float, count: int | None = None) -> Workload:
    """Combine the lengths of `shape` with the arrivals of the options; `rate` and `count` are defaults."""
    count = options.count if options.count is not None or options.duration is not None else count
    rate = options.rate if options.rate is not None else rate
    if options.curve is None and np.isinf(rate):
        return Workload("", shape.at(np.zeros(count if count is not None else len(shape))), closed_loop=True)
    curve = options.curve or constant_rate(rate)
    random = stream(options.seed, "arrivals")
    times = schedule(curve, options.process, random, count=count, duration=options.duration, cv=options.cv)
    if len(times) == 0:
        raise InputError("no request arrives in this duration at this rate; increase --duration or --request-rate")
    # A single request at time 0 has no schedule, so the run is measured to its end.
    horizon = options.duration if options.duration is not None else float(times[-1]) or None
    return Workload("", shape.at(times), horizon=horizon)


def replayed(options: Options, trace: Trace, rate: float | None, by: str | None = None) -> Workload:
    """Replay the arrivals of a trace: apply operators, thin or stretch to the rate, then cut to the duration."""
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
        raise InputError("no request of the trace remains; check --trace-ops, --request-rate and --duration")
    return Workload("", trace, horizon=trace.span or None)


def fixed(count: int, inputs: int, outputs: int) -> Trace:
    """Return `count` requests of equal lengths, without times."""
    return Trace(np.zeros(count), np.full(count, inputs, np.int64), np.full(count, outputs, np.int64), timed=False)


def job_of(options: Options, source: lengths.Lengths, default: int) -> tuple[Job, ...]:
    """Return a job with the lengths of a data set, or none if it would have no lines."""
    count = default if options.offline_lines is None else options.offline_lines
    return (Job(lengths.sample(source, count, options.seed, options.data, "offline")),) if count else ()


def _random(options: Options) -> Workload:
    """Build lengths around `input_tokens` and `output_tokens`, as vLLM's random data set."""
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
    """Replay the file of --trace."""
    if options.trace is None:
        raise InputError("the workload `trace` needs --trace FILE")
    return replace(replayed(options, options.trace, None), jobs=job_of(options, lengths.ARXIV, 0))


def _tiny(options: Options) -> Workload:
    """Build 20 requests and a job of 20 lines, a smoke test for a CPU."""
    made = timed(options, fixed(20, 48, 12), 4.0, 20)
    jobs = (Job(fixed(20 if options.offline_lines is None else options.offline_lines, 48, 12)),)
    return replace(made, jobs=jobs, wait_offline=True)


def _arrivals(source: lengths.Lengths, rate: float | None = None, by: str | None = None) -> Builder:
    """Return the builder of the arrivals of a data set, by default at `rate`, beside arXiv summaries."""

    def make(options: Options) -> Workload:
        trace = lengths.arrivals(source, options.seed, options.data)
        return replace(replayed(options, trace, rate, by), jobs=job_of(options, lengths.ARXIV, 2000))

    return make


def _apt(source: lengths.Lengths) -> Builder:
    def make(options: Options) -> Workload:
        shape = lengths.sample(source, options.count or 4096, options.seed, options.data, "online")
        return replace(timed(options, shape, 1.0, 300), jobs=job_of(options, lengths.ARXIV, 0))

    return make


def _llmd(options: Options) -> Workload:
    """Build 90 s at 15 requests/s and 90 s at 1 request/s, 512 in and 128 out, beside three jobs of 1,000 lines.

    The lines have 512 prompt tokens and a log-normal number of output tokens with mean 500 and standard deviation 400.
    """
    curve = RateCurve(np.array([90.0, 90.0]), np.array([15.0, 1.0]))
    if options.rate is not None:
        curve = curve.scaled(options.rate)
    asked = replace(options, curve=options.curve or curve, rate=None)
    if asked.duration is None and asked.count is None:
        asked = replace(asked, duration=180.0)
    lines = 1000 if options.offline_lines is None else options.offline_lines
    variance = np.log(1.0 + (400 / 500) ** 2)
    random = stream(options.seed, "offline")
    made = [random.lognormal(np.log(500) - variance / 2, np.sqrt(variance), lines) for _ in range(3 if lines else 0)]
    outputs = [np.maximum(1, np.rint(drawn)).astype(np.int64) for drawn in made]
    jobs = tuple(Job(replace(fixed(lines, 512, 1), output_tokens=drawn)) for drawn in outputs)
    return replace(timed(asked, fixed(1, 512, 128), 8.0), jobs=jobs)


def _prefix_batch(options: Options) -> Workload:
    """Build 10,000 lines in random order; groups of 100 share 768 of 896 prompt tokens; 64 tokens out."""
    lines = 10_000 if options.offline_lines is None else options.offline_lines
    groups = stream(options.seed, "lengths").permutation(lines) // 100
    content = tuple(Content(segments=((int(group), 768),)) for group in groups)
    return Workload("", jobs=(Job(replace(fixed(lines, 896, 64), content=content)),), horizon=options.duration)


def _multiturn(options: Options) -> Workload:
    """Build conversations in which every turn has the earlier questions and answers as its prefix."""
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
    notes = ("SYNTHETIC conversations of 4 turns; earlier answers are random text of the same length",)
    return replace(made, jobs=job_of(options, lengths.ARXIV, 0), notes=notes)


def _score_batch(options: Options) -> Workload:
    """Build longer prompts with very short answers, on average 707 in and 5 out."""
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
    "hygen": _arrivals(lengths.AZURE_CONV, 1.0),
    "apt-chat": _apt(lengths.SHAREGPT),
    "apt-code": _apt(lengths.HUMANEVAL),
    "apt-sum": _apt(lengths.ARXIV),
    "larry-chat": _arrivals(lengths.AZURE_CONV, 1.0, "stretch"),
    "larry-code": _arrivals(lengths.AZURE_CODE, 1.0, "stretch"),
    "burst": _arrivals(lengths.AZURE_CODE),
    "llmd-491": _llmd,
    "prefix-batch": _prefix_batch,
    "chat-multiturn": _multiturn,
    "score-batch": _score_batch,
}


def clipped(workload: Workload, scale: float, limit: int | None) -> Workload:
    """Return the workload with lengths scaled, then cut so that prompt and answer fit in `limit` tokens."""
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
