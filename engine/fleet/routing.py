"""Route requests to engines: LARRY's load balancer SAL (section 4.2), and by cached prefixes.

Routers are pure functions of the engines' loads. Engines may differ in speed, pool and latency model. The live and the
simulated fleet share them. A `Member` is one engine of a fleet: its cached prefixes, its rate of offline work, and its
load for a router.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.api import EngineRequest, RequestClass
from engine.client import EngineState, EngineStats, EngineView, LoadReport
from engine.process.client import EngineProcess

BALANCE = 0.25
"""Maximum excess over an engine's proportional share of requests for the sake of a cached prefix."""


Loads = Mapping[int, LoadReport]
"""The load of each engine by number, with the requests that were routed to it since its report. `step_seconds` is
positive: 1 for all engines if one has no latency model. `num_units` 0: the memory is unknown."""


class RoutedPrompt(NamedTuple):
    """A prompt to be routed."""

    tokens: int
    hits: Mapping[int, int] = {}  # by engine, prompt tokens expected in its prefix cache

    def new_tokens(self, engine: int) -> int:
        """Return the tokens that an engine would have to compute; at least the last one, whose output is sampled."""
        return max(1, self.tokens - self.hits.get(engine, 0))


def sal_load(engine: int, load: LoadReport, prompt: RoutedPrompt) -> float:
    """Return the seconds until the engine would have computed the prompt: the wait for memory or for computation.

    This is Equation 2 in steps. Prompts are computed at `tokens_per_step`. Each running request frees (beta - 1) tokens
    per step on average, with beta = (mean input + mean output) / mean output: it frees all its tokens after its mean
    output steps and takes one per step until then.
    """
    tokens = prompt.new_tokens(engine)
    steps = (load.queued_tokens + tokens) / load.tokens_per_step
    if load.num_units:
        needed = math.ceil(tokens / load.tokens_per_unit) + load.queued_units
        lacking = max(0.0, needed - load.available_units) * load.tokens_per_unit
        freed = load.mean_input / max(1.0, load.mean_output) * load.running
        steps = max(steps, lacking / max(1.0, freed))
    return steps * load.step_seconds


def sal(loads: Loads, prompt: RoutedPrompt) -> int:
    """Choose the engine with the shortest wait; among equals, such as idle engines, the one with the least work."""

    def wait(engine: int) -> tuple[float, float, int]:
        load = loads[engine]
        return sal_load(engine, load, prompt), load.num_requests * load.step_seconds, engine

    return min(loads, key=wait)


def prefix(loads: Loads, prompt: RoutedPrompt) -> int:
    """Choose the engine with the longest cached prefix; among equals by SAL.

    Only engines with at most 1 + `BALANCE` times their share of all requests, in proportion to speed, are considered
    ("consistent hashing with bounded loads").
    """
    speed = sum(1.0 / load.step_seconds for load in loads.values())
    requests = sum(load.num_requests for load in loads.values()) + 1

    def has_room(load: LoadReport) -> bool:
        part = requests / load.step_seconds / speed
        return load.num_requests + 1 <= math.ceil((1.0 + BALANCE) * part)

    allowed = {engine: load for engine, load in loads.items() if has_room(load)}  # never empty: not all exceed theirs
    longest = max(prompt.hits.get(engine, 0) for engine in allowed)
    return sal({engine: load for engine, load in allowed.items() if prompt.hits.get(engine, 0) == longest}, prompt)


MAX_BLOCKS = 512
"""Maximum hashed blocks of a prompt; hashing more would block the event loop for too long."""
SPAN_SECONDS = 1.0
WEIGHT = 0.3
"""Weight of a new measurement in the moving average."""
LEAST_SHARE = 0.25
"""Minimum share of lines relative to the mean, so that an engine with many chats is still measured."""


def prefix_chain(token_ids: Sequence[int], salt: bytes, block_size: int) -> list[int]:
    """Return a hash per full block of a prompt, each over the block and all blocks before it.

    The block of the last token is left out because it is always computed. Return [] if `block_size` is 0.
    """
    chain: list[int] = []
    previous = hash(salt)
    if block_size:
        for end in range(block_size, min(len(token_ids), MAX_BLOCKS * block_size + 1), block_size):
            previous = hash((previous, tuple(token_ids[end - block_size : end])))
            chain.append(previous)
    return chain


class PrefixMemory:
    """An estimate of the blocks in an engine's prefix cache, from the requests routed to it.

    It holds as many blocks as the cache, in least recently used order. If it is wrong, the engine computes the prompt.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def num_hits(self, chain: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that are recorded."""
        for index, block in enumerate(chain):
            if block not in self._blocks:
                return index
        return len(chain)

    def add(self, chain: Sequence[int], max_blocks: int) -> None:
        """Record a prompt. Its last block is dropped first, because blocks behind a gap cannot match."""
        for block in reversed(chain):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > max_blocks:
            del self._blocks[next(iter(self._blocks))]


class Harvest:
    """The rate of one engine in offline tokens per second; 0: unknown.

    It depends on the online requests that the engine serves, and is measured between two load reports if batch lines
    were waiting at both.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: LoadReport | None = None

    def hear(self, report: LoadReport | None) -> None:
        """Update the rate if the report is at least `SPAN_SECONDS` later than the last one used."""
        since = self._since
        if report is None or since is None or report.offline_tokens < since.offline_tokens or report.time < since.time:
            self._since = report  # the first report of a process
            return
        seconds = report.time - since.time
        if seconds < SPAN_SECONDS:
            return
        if since.offline_waits and report.offline_waits:
            rate = (report.offline_tokens - since.offline_tokens) / seconds
            self.rate = rate if not self.rate else self.rate + WEIGHT * (rate - self.rate)
        self._since = report


def shares(rates: Mapping[int, float]) -> dict[int, float]:
    """Return each engine's share of the lines; the sum is 1. An unknown rate counts as the mean of the others."""
    known = [rate for rate in rates.values() if rate > 0.0]
    mean = sum(known) / len(known) if known else 1.0
    filled = {engine: max(rate or mean, LEAST_SHARE * mean) for engine, rate in rates.items()}
    total = sum(filled.values())
    return {engine: rate / total for engine, rate in filled.items()}


def windows(part: Mapping[int, float], lines: int) -> dict[int, int]:
    """Return the maximum lines that each engine holds, by its share of `lines`."""
    return {engine: max(1, round(share * lines)) for engine, share in part.items()}


class Member:
    """One engine of a fleet.

    Attributes:
        routed: Number of requests sent to the engine.
        moved: Number of requests moved away because its process had ended.
        leaves: Whether the engine is about to be renewed and gets no new requests.
        away: Whether the engine is the follower of a pipeline or about to be.
    """

    def __init__(self, number: int, engine: EngineProcess) -> None:
        self.number = number
        self.engine = engine
        self.prefixes = PrefixMemory()
        self.harvest = Harvest()
        self.leaves = self.away = False
        self.routed = 0
        self.moved = 0

    @property
    def block_size(self) -> int:
        """Tokens per block that prompts can share; 0 without prefix caching."""
        return self.engine.info.block_size if self.engine.info.shares_prefixes else 0

    @property
    def is_well(self) -> bool:
        """Whether the engine is up and ready."""
        return self.engine.is_up and self.engine.state is EngineState.READY

    def give(self, requests: Sequence[EngineRequest], chain: Sequence[int]) -> None:
        """Record requests sent to the engine. `chain`: the hashes of their prompt (`prefix_chain`)."""
        self.routed += len(requests)
        info = self.engine.info
        self.prefixes.add(chain, info.cache_tokens // info.block_size if info.block_size else 0)

    def lose_cache(self) -> None:
        """Forget the prefixes, because the process has ended or its cache was rebuilt."""
        self.prefixes = PrefixMemory()

    def view(self, stats: EngineStats, partner: int | None = None) -> EngineView:
        engine = self.engine
        return EngineView(
            self.number, engine.state, engine.trouble, self.routed, self.moved, self.harvest.rate, stats,
            partner,
        )  # fmt: skip


def online_load(report: LoadReport | None, unreported: Iterable[EngineRequest]) -> LoadReport:
    """Return the last report plus the requests sent since, as if no request had ended since then."""
    report = report or LoadReport()
    prompts = [len(r.prompt_token_ids) for r in unreported if r.request_class is RequestClass.ONLINE]
    return report._replace(
        queued_tokens=report.queued_tokens + sum(prompts),
        queued_units=report.queued_units + sum(math.ceil(tokens / report.tokens_per_unit) for tokens in prompts),
        queued_requests=report.queued_requests + len(prompts),
    )


def offline_load(held: int, share: float) -> LoadReport:
    """Return the offline load: `held` batch lines at a speed in proportion to `share`."""
    return LoadReport(queued_requests=held, queued_tokens=held, tokens_per_step=1, step_seconds=1.0 / share)


def hits_of(members: Iterable[Member], chain: Sequence[int]) -> Mapping[int, int]:
    """Return, by engine, the tokens of a prompt that its prefix cache is expected to hold."""
    return {member.number: member.prefixes.num_hits(chain) * member.block_size for member in members}
