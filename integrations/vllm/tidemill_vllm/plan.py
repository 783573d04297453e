"""Plans one step: which requests run and how many tokens each, within the time that the promises leave.

Online work comes first. Decodes are mandatory. Prompts are sized by the slack of the decodes beside them, and one
prompt per step always gets a floor chunk. Offline work fills the rest of the step's time budget. The module knows
nothing of vLLM. Times are in seconds on one clock.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from predictor.features import BatchFeatures, LatencyPredictor, Reach, smallest_step

EASY_SHARE = 0.8
"""Share of a gap limit that a step should take while every prompt is on time. Step times vary."""
IDLE_SHARE = 0.3
"""Share of the strictest TTFT limit that a step without online work may take, because an arrival waits for its end."""
FLOOR_SHARE = 0.8
"""Share of the limit that a step with a floor chunk is expected to take, without a margin."""
FLOOR_TOKENS = 64
"""Maximum tokens of a floor chunk."""
LOST_STEPS = 4.0
"""Limit of an offline step, in smallest steps, if even the smallest step exceeds the strictest gap limit."""
LOST_FACTOR = 2.0
"""A step whose decodes are all late may take this many times its online work."""
LEAST_CHUNK = 16
"""Smallest useful chunk of an offline prompt, in tokens."""


class Decode(NamedTuple):
    """A running request that samples in this step: computed tokens, tokens that it wants, and when its token is due."""

    start: int
    wants: int
    due: float = math.inf
    gap: float = math.inf  # its limit between two tokens


class Prompt(NamedTuple):
    """A request with prompt tokens to compute: computed tokens, missing tokens, and when its first token is due."""

    start: int
    length: int
    due: float = math.inf


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that could run in a step.

    Attributes:
        now: Time at which the step starts.
        decodes: Online decodes.
        prompts: Online prompts, running ones first, then waiting ones, in the order in which vLLM would take them.
        offline_decodes: Offline decodes, preferred ones first.
        offline_prompts: Offline prompts that are partly computed, then waiting ones that memory and rows admit.
        waits: Whether an online prompt waits. A partly computed offline prompt would overtake it in vLLM's loop.
        num_running_prompts: Leading `offline_prompts` that are partly computed.
    """

    now: float
    decodes: Sequence[Decode] = ()
    prompts: Sequence[Prompt] = ()
    offline_decodes: Sequence[Decode] = ()
    offline_prompts: Sequence[Prompt] = ()
    num_running_prompts: int = 0
    waits: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
        tokens: All tokens of the step, the limit that vLLM gets.
        prompt_tokens: Tokens of online prompts.
        num_decodes: Leading offline decodes that run.
        num_prompts: Leading offline prompts that run.
        seconds: Predicted time of the step.
        limit: Predicted end up to which offline work could extend the step.
    """

    tokens: int
    prompt_tokens: int = 0
    num_decodes: int = 0
    num_prompts: int = 0
    seconds: float = 0.0
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds every step.

    Attributes:
        tokens: Maximum tokens of a step.
        ttft, tbt: Strictest absolute limits of any class; infinite: none.
        in_flight: Steps that may be in flight at once: an arrival waits for all of them.
        block: Chunks of prompts end at multiples of this many tokens, or at the prompt's end; 1: anywhere.
    """

    tokens: int
    ttft: float = math.inf
    tbt: float = math.inf
    in_flight: int = 1
    block: int = 1

    def aligned(self, start: int, length: int, wanted: int) -> int:
        """Return a chunk of about `length` tokens that ends at a block boundary or after `wanted` tokens."""
        if self.block == 1 or length >= wanted:
            return min(length, wanted)
        down = (start + length) // self.block * self.block - start
        return down if down > 0 else min(wanted, down + self.block)


class Planner:
    """Plan steps with a latency model. `share` (0 to 1) scales the time that offline work gets beside online work."""

    def __init__(self, model: LatencyPredictor, limits: Limits) -> None:
        self._model, self._limits = model, limits

    def plan(self, load: Load, share: float, most: int) -> StepPlan:
        """Return the plan of a step of at most `most` tokens."""
        return _Step(self._model, self._limits, load, most).plan(share)


@dataclass(slots=True)
class _Step:
    model: LatencyPredictor
    limits: Limits
    load: Load
    most: int
    features: BatchFeatures = field(init=False)
    beside: BatchFeatures = field(init=False)
    seconds: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.features = self.beside = BatchFeatures(self.model.reach)

    def plan(self, share: float) -> StepPlan:
        if self.load.decodes:
            self.tokens, reads = _sums(self.load.decodes, self.model.reach)
            self.features.add_decodes(self.tokens, reads)
            self.seconds = self.model.predict(self.features)
        self.beside = self.features.copy()
        gap = self._tightest()
        prompt_tokens = self._add_prompts(gap)
        limit = self._offline_limit(gap, share)
        is_online = self.tokens > 0
        decodes = self._add_offline_decodes(limit, must=not is_online)
        prompts = self._add_offline_prompts(limit, must=not is_online and not decodes)
        return StepPlan(self.tokens, prompt_tokens, decodes, prompts, self.seconds, limit)

    def _tightest(self) -> float:
        """Return the seconds in which the step must end for its decodes; infinite if no decode can be on time.

        A decode that would be late even in a step of decodes alone cannot be saved by starving the prompts.
        """
        slacks = [min(decode.due - self.load.now, decode.gap) for decode in self.load.decodes]
        if not slacks:
            return math.inf
        if (tightest := min(slacks)) >= self.seconds:
            return tightest
        usual = self.model.usual(self.features)
        return max(self.seconds, min((slack for slack in slacks if slack >= usual), default=math.inf))

    # ---- online prompts

    def _add_prompts(self, gap: float) -> int:
        """Add online prompts as far as `gap` allows; return their tokens."""
        limit, added = gap, 0
        if math.isfinite(gap) and self.load.prompts and self._slack(EASY_SHARE * gap) > 0.0:
            limit = EASY_SHARE * gap
        for prompt in self.load.prompts:
            length = self._chunk(prompt, limit, is_first=not added)
            if length < 1:
                break
            self._add_chunk(prompt.start, length)
            added += length
            if length < prompt.length:
                break
            if (slack := prompt.due - self.load.now) >= self.seconds:
                limit = min(limit, slack)  # the prompts behind it must not make its first token late
        return added

    def _chunk(self, prompt: Prompt, limit: float, *, is_first: bool) -> int:
        room = min(prompt.length, self.most - self.tokens)
        if room < 1:
            return 0
        if math.isinf(limit):
            return min(room, self.limits.aligned(prompt.start, room, prompt.length))
        left = limit - self.seconds
        fits = self.model.max_prefill(self.features, left, room, prompt.start) if left > 0.0 else 0
        if is_first:
            fits = max(fits, min(room, self._floor(limit, prompt.start)))
        return min(room, self.limits.aligned(prompt.start, fits, prompt.length)) if fits else 0

    def _floor(self, limit: float, start: int) -> int:
        """Return the tokens that one prompt per step gets however late the decodes are."""
        fits = self.model.expected_prefill(self.features, FLOOR_SHARE * limit, FLOOR_TOKENS, start)
        return max(fits, LEAST_CHUNK)

    def _add_chunk(self, start: int, length: int) -> None:
        if self.tokens:
            self.seconds += self.model.marginal(self.features, start, length)
            self.features.add_chunk(start, length)
        else:
            self.features.add_chunk(start, length)
            self.seconds = self.model.predict(self.features)
        self.tokens += length

    def _slack(self, gap: float) -> float:
        """Return the seconds that the prompts can be delayed if each step beside the decodes takes `gap`."""
        beside, step = self.beside, self.model.predict(self.beside)
        room = max(1, self.most - beside.num_tokens)
        chunk = room
        if self.load.decodes and math.isfinite(gap):
            chunk = max(self.model.max_prefill(beside, max(0.0, gap - step), room, 0), min(room, self._floor(gap, 0)))
        per_token = (step + self.model.marginal(beside, 0, chunk)) / chunk
        end, slack = self.load.now + step, math.inf
        for prompt in self.load.prompts:
            end += prompt.length * per_token
            slack = min(slack, prompt.due - end)
        return max(0.0, slack)

    # ---- offline work

    def _offline_limit(self, gap: float, share: float) -> float:
        """Return the predicted end, in seconds, up to which offline work may extend the step."""
        limits, online = self.limits, bool(self.load.decodes or self.load.prompts)
        smallest = smallest_step(self.model)
        is_lost = smallest > limits.tbt
        if not online:
            limit = IDLE_SHARE * limits.ttft / limits.in_flight
            return max(limit, LOST_STEPS * smallest) if is_lost else limit
        limit = min(EASY_SHARE * limits.tbt, gap)
        if self.load.decodes and math.isinf(gap):
            limit = LOST_FACTOR * self.seconds
        elif not self.load.decodes:
            limit = IDLE_SHARE * limits.ttft
        limit = self.seconds + share * max(0.0, limit - self.seconds)
        if self.load.prompts:
            limit = min(limit, self.seconds + self._slack(gap) / 2)
        return limit

    def _add_offline_decodes(self, limit: float, *, must: bool) -> int:
        """Add the longest leading run of offline decodes that fits; return its number. `must`: at least one."""
        decodes, room = self.load.offline_decodes, self.most - self.tokens
        if not decodes or room < 1:
            return 0
        reach, base = self.features.reach, self.seconds if self.tokens else self.model.predict(self.features)
        count, read = _sums(decodes, reach)
        if count <= room and (end := base + self.model.marginal_decodes(self.features, count, read)) <= limit:
            self.seconds = end
            self.features.add_decodes(count, read)
            self.tokens += count
            return len(decodes)
        counts = list(accumulate(decode.wants for decode in decodes))
        reads = list(accumulate(decode.wants * reach.tokens(decode.start, 1) for decode in decodes))

        def ends(number: int) -> float:
            return base + self.model.marginal_decodes(self.features, counts[number - 1], reads[number - 1])

        most = bisect_right(counts, room)
        number = most if math.isinf(limit) else bisect_right(range(1, most + 1), limit, key=ends)
        number = max(number, min(most, int(must)))
        if number:
            self.seconds = ends(number)
            self.features.add_decodes(counts[number - 1], reads[number - 1])
            self.tokens += counts[number - 1]
        return number

    def _add_offline_prompts(self, limit: float, *, must: bool) -> int:
        """Add chunks of offline prompts in order; return how many prompts get one."""
        load, added = self.load, 0
        prompts = load.offline_prompts
        if load.waits and load.num_running_prompts:
            return 0  # vLLM would compute it before the online prompt that waits
        for prompt in prompts:
            room = min(prompt.length, self.most - self.tokens)
            if room < 1:
                break
            base = 0.0 if self.tokens else self.model.predict(self.features)
            left = limit - self.seconds - base
            fits = (
                room if math.isinf(left) else self.model.max_prefill(self.features, max(0.0, left), room, prompt.start)
            )
            is_due = must and not added
            if is_due:
                fits = max(fits, min(room, LEAST_CHUNK))
            length = min(room, self.limits.aligned(prompt.start, fits, prompt.length)) if fits else 0
            if not is_due and length < min(prompt.length, LEAST_CHUNK):
                break
            self._add_chunk(prompt.start, length)
            added += 1
            if length < prompt.length:
                break
        return added


def _sums(decodes: Sequence[Decode], reach: Reach) -> tuple[int, int]:
    """Return the tokens of the decodes, and the context tokens that they read."""
    contexts = [decode.start + 1 for decode in decodes]
    count = sum([decode.wants for decode in decodes])
    if count == len(decodes):
        return count, reach.contexts(contexts)
    return count, sum([wants * reach.tokens(start, 1) for start, wants, *_ in decodes])
