"""A simulated fleet that is short of memory: KunServe's drop and restore, or requests that migrate to a sibling.

Plans are those of `engine.fleet`; here they get time and transport. A drop: the groups that merge end their steps, one
core takes the place of theirs with the cache of all engines and the room of the dropped layers, and every running
request stands still until the layers of its past have changed hands, while new ones run. A restore: the cache gives
back the room, the layers come from the siblings, and requests go home.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import itemgetter
from typing import NamedTuple

from benchmarks.experiments.machine import Machine
from benchmarks.simulated_fleet.fleet import FleetDriver, Server, launcher_of, queued_work
from benchmarks.simulated_fleet.pipeline import Bubbles, Link, PipelineRunner, Transfer
from benchmarks.simulated_fleet.plans import pipeline_units, plan_drop, split_layers
from engine.cache.blocks import count_units
from engine.core import EngineCore
from engine.execution.stages import BatchPiece, MicroBatch, balanced, cut
from engine.fleet.overload import Group, should_restore
from engine.limits import UNITS_PER_BLOCK
from engine.scheduling.moving import MovedRequest, Moves
from engine.scheduling.report import report_stats

DROP_SECONDS = 0.005
"""Remapping memory (KunServe §4.1)."""
FALLING = 1.0
"""Seconds over which use is compared before layers are restored."""
MOVES = 4
"""Requests that leave a server for another one at a time."""


def by_tokens(pieces: Sequence[BatchPiece], count: int) -> list[MicroBatch]:
    """Split the pieces, in order, into `count` micro-batches of about the same number of tokens: the usual method."""
    total, found, rest = sum(piece.length for piece in pieces), [], list(pieces)
    for number in range(count, 1, -1):
        tokens = -(-total // number)
        first, rest = cut(rest, tokens)
        total -= sum(piece.length for piece in first)
        found.append(first)
    found.append(rest)
    return [batch for batch in found if batch]


@dataclass(frozen=True, slots=True)
class Means:
    """Remedy of a fleet for a shortage. `pipeline`: engines of each group from the start, with half the layers or
    less. `host_gib`: where preempted requests keep their cache."""

    name: str
    drop: bool = False
    migrate: bool = False
    pipeline: int = 1
    host_gib: float = 0.0
    lookahead: bool = True
    coordinated: bool = True
    restore: bool = True


def moves(core: EngineCore) -> Moves:
    return Moves(core.state, core.recovery)


@dataclass(slots=True, eq=False)
class Party:
    """A server with its engines: one, or a pipeline. `placement`: engines and the layers that each has; `undropped`:
    units of cache that they have with all layers in place; `used`: time and units held then; `retiring`: units that
    are being given back; `pulls`: the layers that come back."""

    server: Server
    placement: tuple[tuple[int, range], ...]
    undropped: int
    used: tuple[float, int] = (0.0, 0)
    retiring: int = 0
    pulls: list[Transfer] | None = None

    @property
    def dropped(self) -> int:
        """Units that the dropped layers gave."""
        return report_stats(self.server.core.state).units_total - self.undropped


@dataclass(slots=True)
class Tally:
    """What happened: drops and restores, plans that were not enough, engine-seconds in pipelines, requests that were
    moved and the seconds that they stood still, and the largest share of all cache in use."""

    drops: int = 0
    restores: int = 0
    too_little: int = 0
    seconds_dropped: float = 0.0
    moved: int = 0
    stalled: float = 0.0
    peak: float = 0.0
    bubbles: Bubbles = field(default_factory=Bubbles)


class LayerTransfer(NamedTuple):
    """The number of layers whose K and V move from one engine to another."""

    source: int
    target: int
    layers: int


def exchanges(before: Sequence[tuple[int, range]], after: Sequence[tuple[int, range]]) -> list[LayerTransfer]:
    """Return the exchanges for a request whose layers move from `before` to `after`, both as (engine, layers)."""
    found: dict[tuple[int, int], int] = {}
    for source, held in before:
        for target, kept in after:
            common = min(held.stop, kept.stop) - max(held.start, kept.start)
            if source != target and common > 0:
                found[source, target] = found.get((source, target), 0) + common
    return [LayerTransfer(source, target, layers) for (source, target), layers in found.items()]


class OverloadedFleet:
    """`engines` engines of one machine under `means`; hand `watch` to the driver, and `bind` the driver before it runs.

    `link`: bytes/s of each engine's network. `min_tokens`: of a micro-batch, on average.
    """

    def __init__(
        self, machine: Machine, engines: int, means: Means, *, link: float, min_tokens: int, seed: int
    ) -> None:
        self.tally = Tally()
        self.parties: dict[int, Party] = {}
        self._machine = machine
        self._means = means
        self._min_tokens = min_tokens
        self._seed = seed
        self._links = [Link(link, coordinated=means.coordinated) for _ in range(engines)]
        self._numbers = count()
        self._closing: list[tuple[Party, ...]] = []
        self._leaving: dict[Server, tuple[Party, Party, int]] = {}
        self._preempted = 0
        model = machine.device.model
        self._layer_bytes = sum(rows * columns for rows, columns in model.linears()) * model.bytes_per_value
        self._unit_bytes = machine.config.block_size * model.kv_bytes_per_token / UNITS_PER_BLOCK
        self._head = machine.device.head_seconds(64) / (machine.device.linear_seconds(64) / model.num_layers)
        size = means.pipeline
        for first in range(0, engines, size):
            self._make(tuple(range(first, first + size)), 0.0)

    @property
    def servers(self) -> list[Server]:
        """What requests are routed to."""
        return [party.server for party in self.parties.values()]

    @property
    def preemptions(self) -> int:
        """Requests that lost their place for want of memory, on servers of now and before."""
        return self._preempted + sum(sum(server.core.state.counters.preemptions.values()) for server in self.servers)

    def bind(self, driver: FleetDriver) -> None:
        self.driver = driver
        driver.on_idle = self._idle

    def watch(self, now: float) -> None:
        """Look at every server, ten times a second."""
        parties = [party for party in self.parties.values() if not party.server.closed]
        stats = [report_stats(party.server.core.state) for party in parties]
        total, used = sum(s.units_total for s in stats), sum(s.units_owned for s in stats)
        self.tally.peak = max(self.tally.peak, used / total if total else 0.0)
        pipelines = sum(len(party.placement) for party in parties if len(party.placement) > 1)
        self.tally.seconds_dropped += 0.1 * pipelines
        if self._means.migrate:
            self._migrate(parties)
        if self._means.drop:
            self._drop(parties)
            for party in parties:
                if self._means.restore and len(party.placement) > 1 and not party.server.closed:
                    self._restore(party, now)

    def _drop(self, parties: Sequence[Party]) -> None:
        groups = [_group(party) for party in parties]
        copy_units = int(self._machine.device.model.num_layers * self._layer_bytes / self._unit_bytes)
        merges, enough = plan_drop(groups, copy_units)
        for party, group in zip(parties, groups, strict=True):
            if group.is_short and party.retiring and party.pulls is None:  # retiring units are needed
                party.server.core.state.pool.grow(party.retiring)
                party.retiring = 0
        if any(group.is_short for group in groups):
            self.tally.too_little += not enough
        for members in merges:
            self._close([parties[i] for i in members])

    def _close(self, parties: Sequence[Party]) -> None:
        for party in parties:
            self.driver.close(party.server)
        self._closing.append(tuple(parties))
        self._idle(parties[0].server)

    def _idle(self, server: Server) -> None:
        """A step has ended: requests leave, and servers change as planned."""
        if (leaving := self._leaving.pop(server, None)) is not None:
            self._leave(*leaving)
        for parties in list(self._closing):
            if not any(party.server.flights for party in parties):
                self._closing.remove(parties)
                if len(parties) > 1:
                    self.tally.drops += 1
                    self._regroup(parties, [tuple(engine for party in parties for engine, _ in party.placement)])
                else:
                    self.tally.restores += 1
                    self._regroup(parties, [(engine,) for engine, _ in parties[0].placement])

    def _regroup(self, old: Sequence[Party], groups: Sequence[tuple[int, ...]]) -> None:
        """Other servers take the place of `old`, with all their requests."""
        driver, now = self.driver, self.driver.now
        moved: list[tuple[float, MovedRequest, Party]] = []
        for party in old:
            core = party.server.core
            self._preempted += sum(core.state.counters.preemptions.values())
            held = moves(core).open_requests()
            moved += [(found.times.arrival, moves(core).detach(found.request_id), party) for found in held]
            del self.parties[party.server.number]
            driver.remove(party.server)
        made = [self._make(group, now + DROP_SECONDS) for group in groups]
        load = [0] * len(made)
        for _, request, source in sorted(moved, key=itemgetter(0)):
            # Each to the one that has least, in tokens: at first there is nothing else to tell them apart.
            index = min(range(len(made)), key=lambda i: load[i])
            load[index] += request.num_tokens or len(request.spec.prompt_token_ids)
            self._hand_over(request, source.placement, made[index])
        for party in made:
            driver.add(party.server)

    def _hand_over(self, moved: MovedRequest, placement: Sequence[tuple[int, range]], target: Party) -> None:
        """Attach a request to its new server, and let it run when the layers of its past have come."""
        core, now = target.server.core, self.driver.now
        if not moves(core).attach(moved):
            return
        transfers = [self._send(part, moved.num_tokens) for part in exchanges(placement, target.placement)]
        self.tally.moved += 1
        self._await(transfers, lambda: self._arrived(target.server, moved.spec.request_id, now))

    def _arrived(self, server: Server, request_id: str, since: float) -> None:
        self.tally.stalled += self.driver.now - since
        moves(server.core).arrived(request_id)
        self.driver.pump(server)

    def _send(self, part: LayerTransfer, tokens: int) -> Transfer:
        model = self._machine.device.model
        num_bytes = tokens * model.kv_bytes_per_token * part.layers / model.num_layers
        return self._links[part.source].transfer(self.driver.now, num_bytes)

    def _await(self, transfers: Sequence[Transfer], then: Callable[[], None]) -> None:
        """Call `then` when all have ended; activations may put them off."""
        end = max((transfer.ends_at for transfer in transfers), default=0.0)
        if end <= self.driver.now:
            then()
        else:
            self.driver.at(end, lambda: self._await(transfers, then))

    def _restore(self, party: Party, now: float) -> None:
        """Give the won memory back once it is hardly needed, fetch the layers, and split the group."""
        core, group = party.server.core, _group(party)
        if party.pulls is not None:
            return
        if party.retiring:
            if core.state.pool.num_retiring_units == 0:
                self._pull(party)
            return
        if now - party.used[0] < FALLING:
            return
        falling = should_restore(group, party.used[1], party.undropped)
        party.used = (now, group.used)
        if falling:
            party.retiring = party.dropped
            core.state.pool.shrink(party.retiring)

    def _pull(self, party: Party) -> None:
        """The layers that each engine lacks, from those that have them."""
        whole = range(self._machine.device.model.num_layers)
        parts = [part for engine, _ in party.placement for part in exchanges(party.placement, [(engine, whole)])]
        now = self.driver.now
        party.pulls = [self._links[part.source].transfer(now, part.layers * self._layer_bytes) for part in parts]
        self._await(party.pulls, lambda: self._close([party]))

    def _migrate(self, parties: Sequence[Party]) -> None:
        """Running requests of a server with a queue go to the one that has most room (Llumnix)."""
        for party in parties:
            group = _group(party)
            others = [(other, _group(other)) for other in parties if other is not party]
            spare = [(g.units - g.used, other) for other, g in others if g.queued == 0]
            if group.missing <= 0 or not spare:
                continue
            room, target = max(spare, key=lambda item: item[0])
            self._leaving[party.server] = (party, target, min(group.missing, room // 2))

    def _leave(self, party: Party, target: Party, units: int) -> None:
        """Some of its requests go, the largest first: no step of theirs is in flight."""
        core = party.server.core
        running = [r for r in moves(core).open_requests() if r.row >= 0]
        held = sorted(((count_units(r.cache_map.blocks), r.request_id) for r in running), key=lambda each: -each[0])
        for size, request_id in [each for each in held if each[0] <= units][:MOVES]:
            if size <= units:
                units -= size
                self._hand_over(moves(core).detach(request_id), party.placement, target)

    def _make(self, engines: tuple[int, ...], at: float) -> Party:
        """Return a server of `engines`: one, or a pipeline with a copy of the model between them."""
        machine, number, size = self._machine, next(self._numbers), len(engines)
        config, seed = machine.config, 1000 * self._seed + number
        undropped = size * config.num_units
        if size == 1:
            kept: tuple[range, ...] = (range(machine.device.model.num_layers),)
            host = int(self._means.host_gib * 2**30 / self._unit_bytes)
            limits = replace(config, host_units=host, unit_bytes=int(self._unit_bytes))
            core = EngineCore(limits, offline_policy="fcfs")
            server = Server(number, core, launcher_of(machine.runner(seed)), free_at=at)
        else:
            kept = split_layers(machine.device.model.num_layers, (1.0,) * size, self._head)
            room = [config.num_units * self._unit_bytes] * size
            units = pipeline_units(kept, room, self._layer_bytes, self._unit_bytes / sum(map(len, kept)))
            limits = replace(
                config,
                num_units=undropped,
                max_num_seqs=size * config.max_num_seqs,
                max_num_batched_tokens=size * config.max_num_batched_tokens,
                pipeline_depth=1,
            )
            core = EngineCore(limits, offline_policy="fcfs")
            core.state.pool.grow(units - undropped)
            links = [self._links[engine] for engine in engines]
            runner = PipelineRunner(machine.device, kept, links, self._former(size), self.tally.bubbles, seed)
            server = Server(number, core, runner.launch, free_at=at)
        party = Party(server, tuple(zip(engines, kept, strict=True)), undropped)
        self.parties[number] = party
        return party

    def _former(self, stages: int) -> Callable[[Sequence[BatchPiece]], list[MicroBatch]]:
        if not self._means.lookahead:
            return lambda pieces: by_tokens(pieces, stages)
        model, least = self._machine.predictor, self._min_tokens
        return lambda pieces: balanced(pieces, model, stages=stages, min_tokens=least)


def _group(party: Party) -> Group:
    """How a server stands. Units that retire are held, and are no room."""
    core = party.server.core
    stats, queued = report_stats(core.state), queued_work(core)
    engines = tuple(engine for engine, _ in party.placement)
    return Group(engines, stats.units_total, stats.units_owned, queued.waiting_units)
