"""Where the past of requests that do not run lies: kept, hidden state, host, or dropped (Apt-Serve §4, HybridServe §4).

Whoever loses its place keeps its blocks until somebody needs the room. Then every block can be given up in several
ways, each with a measured cost of bringing it back; `release_units` frees what is asked for at the least cost per unit,
block by block, so that a plan is dearer than the best one by at most its last step on one block while the host has
room. It serves the losers of the knapsack and the victims of a preemption, offline ones too, alike.

- HIDDEN: give up K and V and keep the hidden state, only where that was stored beside them (it cannot be computed from
  KV); restored by projection;
- HOST_KV, HOST_HIDDEN: copy one of them to the bounded host pool and back;
- DROP: recompute. Only the tail of a past can be dropped: progress is one counter.

Pure; seconds and whole units. Knows nothing of requests, pools or copies.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.pool import UNITS_PER_KV_BLOCK
from predictor.features import BatchFeatures, chunk_attention_work
from predictor.model import LatencyPredictor


class Place(enum.Enum):
    """Where one block of a past may go; KEEP: it stays as it is."""

    KEEP = "keep"
    HIDDEN = "hidden"
    HOST_KV = "host-kv"
    HOST_HIDDEN = "host-hidden"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class RestoreCosts:
    """Measured seconds, all ≥ 0, of the real runner.

    recompute         a token's share of a full prefill step
    recompute_pair    and of each earlier token that it attends to (a long past costs more per token)
    restore_hidden    K and V of one token from its hidden state, once
    unit_to_host      one unit from the device to the host, as far as it delays steps
    unit_from_host    and back
    rho               what one token run from hidden state adds to every step
    """

    recompute: float
    restore_hidden: float
    unit_to_host: float
    unit_from_host: float
    rho: float = 0.0
    recompute_pair: float = 0.0

    def recompute_seconds(self, start: int, tokens: int) -> float:
        """Recomputing `tokens` tokens behind `start` that are there."""
        return self.recompute * tokens + self.recompute_pair * chunk_attention_work(start, tokens)

    def rho_per_unit(self, block_size: int) -> float:
        """ρ of the knapsack: seconds a step for the tokens of one KV unit, run from hidden state."""
        return self.rho * block_size / UNITS_PER_KV_BLOCK


def recompute_costs(model: LatencyPredictor, beside: BatchFeatures, chunk: int) -> tuple[float, float]:
    """(`recompute`, `recompute_pair`) as the latency model has them for chunks of `chunk` ≥ 2 tokens in a step that
    already holds `beside`: the model is linear in the chunk's start, so two points give both."""
    at_start = model.marginal(beside, 0, chunk)
    pair = max(0.0, model.marginal(beside, chunk, chunk) - at_start) / (chunk * chunk)
    return max(0.0, at_start - pair * chunk_attention_work(0, chunk)) / chunk, pair


@dataclass(frozen=True, slots=True)
class Past:
    """Blocks of one request in one representation, all of them unshared, up to its last computed token.

    `start`: computed tokens before them (shared, or in another representation). `tokens` ≥ 1 in them. `kv_units`,
    `hidden_units`: device units of each block that hold K and V, and hidden state; 0 where not stored. `can_drop`:
    nothing of the request lies behind them.
    """

    start: int
    tokens: int
    kv_units: int
    hidden_units: int
    block_size: int
    can_drop: bool = True

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.block_size)

    @property
    def units(self) -> int:
        """Device units in all."""
        return self.num_blocks * (self.kv_units + self.hidden_units)

    def tail_tokens(self, blocks: int) -> int:
        """Tokens in the last `blocks` blocks."""
        return max(0, self.tokens - (self.num_blocks - blocks) * self.block_size)


class Parked(NamedTuple):
    """`blocks` blocks of past number `past` go to `place`. Of one past, in this order from its tail: DROP, HOST_KV,
    HOST_HIDDEN, HIDDEN; what is in front of them stays."""

    past: int
    place: Place
    blocks: int


@dataclass(frozen=True, slots=True)
class ParkingPlan:
    """`moves` in the order of the pasts; the device units that they free, the host units that they take, and the
    seconds that it will cost to have everything back as it was."""

    moves: tuple[Parked, ...]
    units: int
    host_units: int
    seconds: float


def release_units(pasts: Sequence[Past], units: int, host_room: int, costs: RestoreCosts) -> ParkingPlan | None:
    """The cheapest way to give up `units` device units, or None when all of them together do not hold that many.

    `host_room`: free host units. Equal costs take the earlier past first, so give them in the order in which they may
    lose. Nothing is moved when nothing is needed.
    """
    if units > sum(past.units for past in pasts):
        return None
    room = _Room(max(units, 0), host_room)
    states = [_State(past) for past in pasts]
    steps: list[_Step] = []
    is_ample = host_room >= sum(past.num_blocks * max(past.kv_units, past.hidden_units) for past in pasts)
    for index, past in enumerate(pasts):
        if units > 0 and past.units:
            steps.extend(_steps(index, past, units, costs, is_ample))
    steps.sort()
    for step in steps:
        if room.units <= 0:
            break
        states[step.past].take(step, room)
    return ParkingPlan(
        moves=tuple(move for index, state in enumerate(states) for move in state.moves(index)),
        units=max(units, 0) - room.units,
        host_units=host_room - room.host,
        seconds=sum(state.seconds(costs) for state in states),
    )


_TAIL_FIRST = (Place.DROP, Place.HOST_KV, Place.HOST_HIDDEN, Place.HIDDEN)


class _Step(NamedTuple):
    """Blocks of one past may go from `source` to `place`; sorts by cost per unit, then by the order of the input."""

    density: float
    past: int
    rank: int
    source: Place
    place: Place
    units: int
    host_units: int


@dataclass(slots=True)
class _Room:
    """Device units still to be freed, and host units still free."""

    units: int
    host: int


@dataclass(slots=True)
class _State:
    """How many blocks of a past are where."""

    past: Past
    counts: dict[Place, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(Place, 0)
        self.counts[Place.KEEP] = self.past.num_blocks

    def take(self, step: _Step, room: _Room) -> None:
        """Move as many blocks as there are, as are needed, and as the host can take."""
        blocks = min(self.counts[step.source], -(-room.units // step.units))
        if step.host_units:
            blocks = min(blocks, room.host // step.host_units)
        self.counts[step.source] -= blocks
        self.counts[step.place] += blocks
        room.units -= blocks * step.units
        room.host -= blocks * step.host_units

    def moves(self, index: int) -> Iterator[Parked]:
        for place in _TAIL_FIRST:
            if blocks := self.counts[place]:
                yield Parked(index, place, blocks)

    def seconds(self, costs: RestoreCosts) -> float:
        """What the moves cost, with the tokens that are really in those blocks."""
        total, behind = 0.0, 0
        for place in _TAIL_FIRST:
            through = behind + self.counts[place]
            end, begin = (self.past.tokens - self.past.tail_tokens(blocks) for blocks in (behind, through))
            if end > begin:
                total += _seconds(self.past, place, begin, end - begin, self.counts[place], costs)
            behind = through
        return total


def _seconds(past: Past, place: Place, begin: int, tokens: int, blocks: int, costs: RestoreCosts) -> float:
    """Seconds to have `blocks` blocks back as they were; `tokens` tokens from `begin` (within the past) are in them.

    What is stored as hidden state alone would have to be restored anyway: only what goes beyond that counts.
    """
    both_ways = costs.unit_to_host + costs.unit_from_host
    restore = costs.restore_hidden * tokens
    if place is Place.HOST_KV:
        return both_ways * past.kv_units * blocks
    if place is Place.HIDDEN:
        return restore
    if place is Place.HOST_HIDDEN:
        return both_ways * past.hidden_units * blocks + (restore if past.kv_units else 0.0)
    recompute = costs.recompute_seconds(past.start + begin, tokens)
    return recompute if past.kv_units else max(0.0, recompute - restore)


def _steps(index: int, past: Past, units: int, costs: RestoreCosts, is_ample: bool) -> Iterator[_Step]:
    """All moves of the past's blocks, priced for as many blocks from its tail as `units` units need. Where the host's
    room is not `is_ample` for everything, none fills it with K and V only to free the units of a hidden state."""
    kv, hidden = past.kv_units, past.hidden_units
    # (where it may go, units that this frees in all, host units that it takes)
    ways = [(Place.DROP, kv + hidden, 0)] if past.can_drop else []
    if kv:
        ways.append((Place.HOST_KV, kv + hidden, kv))
    if hidden:
        ways.append((Place.HOST_HIDDEN, kv + hidden, hidden))
    if kv and hidden:
        ways.append((Place.HIDDEN, kv, 0))
    for rank, (place, freed, host_units) in enumerate(ways):
        blocks = min(past.num_blocks, -(-units // freed))
        tokens = past.tail_tokens(blocks)
        seconds = _seconds(past, place, past.tokens - tokens, tokens, blocks, costs)
        yield _Step(_density(seconds, blocks * freed), index, 2 * rank, Place.KEEP, place, freed, host_units)
        if kv and hidden and (place in {Place.DROP, Place.HOST_HIDDEN} or (place is Place.HOST_KV and is_ample)):
            # A step before gave up K and V alone: what this one adds is paid by the units of the hidden state.
            added = max(0.0, seconds - costs.restore_hidden * tokens)
            yield _Step(_density(added, blocks * hidden), index, 2 * rank + 1, Place.HIDDEN, place, hidden, host_units)


def _density(seconds: float, units: int) -> float:
    """To nine digits, so that equal costs are equal and the order of the input decides."""
    return float(f"{seconds / units:.8e}")
