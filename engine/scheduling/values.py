"""What running a request is worth to the knapsack: Apt-Serve's pending time (§4.2), and `goodput` (ours).

Both demote a request that has missed its SLO, by one knob, `tail`: such a request counts with `tail` times its pending
time, so that after 1/tail objectives of waiting it is worth as much as any that can still be saved. 0 is the paper's
near-zero constant, the best attainment, and starves about a tenth; 0.4 is the paper's decayed variant (§6.6). Also
Apt-Serve's vote on the type of an iteration (§5), for schedulers without chunked prefill.

Plain numbers in and out; seconds on the core's clock. Knows nothing of queues, units or steps.
"""

import enum
from collections.abc import Iterable, Sequence

from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor

DEFAULT_TAIL = 0.4
EPSILON = 1e-6
"""What a request is worth that has missed its SLO, at least: more than nothing, less than any that can be saved."""


def pending_time(now: float, arrival: float, last_token: float | None) -> float:
    """Seconds since its last token, or since its arrival before the first one (p of Apt-Serve's Eq. 5)."""
    return max(0.0, now - (arrival if last_token is None else last_token))


def has_missed(
    now: float, arrival: float, first_token: float | None, last_token: float | None, *, ttft: float, tbt: float
) -> bool:
    """Whether the SLO is broken as the clock stands: the first token came or is late, or the next one is."""
    if first_token is None or last_token is None:
        return now - arrival > ttft
    return first_token - arrival > ttft or now - last_token > tbt


def seconds_to_token(
    model: LatencyPredictor, base: float, beside: BatchFeatures, start: int, length: int, chunk: int
) -> float:
    """Predicted seconds until a request has its next token if it runs from now on.

    `beside`: the decodes that run in the same steps; `base`: `model.predict(beside)`. `start` computed tokens, `length`
    ≥ 1 still to be computed, at most `chunk` in a step. Steps differ only in their start, in which every term of the
    model is linear: the middle one, times their number.
    """
    full, rest = divmod(length, chunk)
    seconds = 0.0
    if full:
        seconds += full * (base + model.marginal(beside, start + chunk * (full - 1) // 2, chunk))
    if rest:
        seconds += base + model.marginal(beside, start + full * chunk, rest)
    return seconds


def apt_values(pending: Sequence[float], savable: Sequence[bool], tail: float = DEFAULT_TAIL) -> list[float]:
    """The paper's values, in seconds: the pending times that running ends. `savable`: who has not missed its SLO."""
    return [time if hope else (max(EPSILON, tail * time)) for time, hope in zip(pending, savable, strict=True)]


def goodput_values(
    pending: Sequence[float], savable: Sequence[bool], ttft: float, tail: float = DEFAULT_TAIL
) -> list[float]:
    """1 for who can still meet its SLO. `ttft` > 0: the objective; the values count in units of it, and so must ρ:
    divide seconds by `ttft`, or by 1 s when none is stated."""
    share = tail / ttft
    return [1.0 if hope else (max(EPSILON, share * time)) for time, hope in zip(pending, savable, strict=True)]


class IterationType(enum.Enum):
    """What one iteration runs when prompts are not chunked into the steps of the decodes."""

    PREFILL = "prefill"
    DECODE = "decode"


def vote(waiting: Iterable[tuple[float, bool]], running: Iterable[tuple[float, bool]]) -> IterationType:
    """The queue with the larger sum of pending times decides; equal sums decode. Items: (pending time, savable).

    Who has missed its SLO has no vote; all have one when nobody else does. An empty queue never wins.
    """
    waiting, running = list(waiting), list(running)
    if not waiting or not running:
        return IterationType.PREFILL if waiting else IterationType.DECODE
    only_savable = any(savable for _, savable in (*waiting, *running))
    urgent_waiting, urgent_running = (
        sum(pending for pending, savable in queue if savable or not only_savable) for queue in (waiting, running)
    )
    return IterationType.PREFILL if urgent_waiting > urgent_running else IterationType.DECODE
