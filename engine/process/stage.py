"""Carry out the orders by which an engine process joins or leaves a pipeline of two engines.

Pasts that change their units are copied before the pool is resized and written back afterwards, so they take memory
twice for a moment. The pasts of a leader's own requests stay in their units when it drops layers. A pipeline serves
before its pasts are complete: requests without a past run, and each stalled request joins them when its past has come
(KunServe §4.2).
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from engine.api import EngineRequest
from engine.engine import Engine, OutputSink
from engine.errors import EngineUnavailableError, TidemillError
from engine.machine.child import Link, LinkLostError
from engine.process import frames
from engine.process.frames import FOLLOWER, LEADER, WHOLE, Order, Part, Past
from engine.scheduling.moving import MovedRequest

if TYPE_CHECKING:  # the tests run a stage without torch
    from engine.execution.stages import PipelineRunner

log = logging.getLogger("tidemill.engine")

MEET_SECONDS = 10.0
RETIRE_LOOKS, LOOK_SECONDS = 400, 0.05


class PipelineStage:
    """The pipeline state of one engine process.

    Args:
        sink: Takes the outputs of attached requests.
        resume: Queues a request to be computed again.
        knows: Returns whether a request is here or about to be queued here.
        parted: Called when the other engine is lost.
    """

    def __init__(
        self,
        engine: Engine,
        sink: OutputSink,
        resume: Callable[[EngineRequest], None],
        knows: Callable[[str], bool],
        parted: Callable[[], None],
    ) -> None:
        self.closed = False
        self.role = WHOLE
        self._engine = engine
        self._sink = sink
        self._resume = resume
        self._knows = knows
        self._parted = parted
        self._lock = asyncio.Lock()
        self._link: Link | None = None
        self._listener: socket.socket | None = None
        self._following: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._num_orders = 0
        self._aborted: set[str] = set()
        self._staged: dict[str, list[tuple[range, bytes]]] = {}
        engine.on_parted = parted

    @property
    def _runner(self) -> "PipelineRunner":
        return cast("PipelineRunner", self._engine.runner)

    def take(self, order: Order) -> Awaitable[tuple[Past, ...]]:
        """Return an awaitable that carries out an order. Later messages may be handled before it is done.

        It raises TidemillError if the order fails; after that only `Reset` is valid.
        """
        self._num_orders += 1
        if isinstance(order, frames.Reset):
            self.close()  # unblocks calls that wait for the other engine
            known = set(order.known)
            for found in self._engine.moves.open_requests():
                if found.request_id not in known and self._knows(found.request_id):
                    self._engine.drop(found.request_id)
        return self._carry_out(order)

    def abort(self, request_id: str) -> None:
        """Record that the gateway has aborted a request that may be about to be attached."""
        if self._num_orders:
            self._aborted.add(request_id)

    async def _carry_out(self, order: Order) -> tuple[Past, ...]:
        async with self._lock:
            try:
                return await self._do(order)
            except Exception as error:
                self.close()  # unblocks the other engine; the gateway orders a reset
                if isinstance(error, TidemillError):
                    raise
                if isinstance(error, LinkLostError):
                    raise EngineUnavailableError(f"the other engine is gone: {error}") from None
                log.exception("%s failed", type(order).__name__)  # an error of the runner or the core
                raise EngineUnavailableError(f"{type(order).__name__} failed: {error!r}") from None
            finally:
                self._num_orders -= 1
                if not self._num_orders:
                    self._aborted.clear()

    async def _do(self, order: Order) -> tuple[Past, ...]:
        match order:
            case frames.Hold(closes):
                await self._hold(closes)
            case frames.Meet(path, listens):
                await self._meet(path, listens)
            case frames.Stall(num_units):
                return self._stall(num_units)
            case frames.Detach():
                return self._detach()
            case frames.Reform():
                await self._reform(order)
            case frames.Attach(requests):
                for request, _ in requests:
                    with suppress(TidemillError):  # its step then fails for this request only
                        await self._engine.prepare([request])
                return tuple(self._attach(requests))
            case frames.Deliver(own, attached):
                await self._deliver(own, attached)
            case frames.Go(role, pasts):
                await self._go(role, pasts)
            case frames.Retire(num_units):
                return await self._retire(num_units)
            case frames.Prepare(num_units):
                await asyncio.to_thread(self._runner.prepare_restore, num_units)
            case frames.Dissolve():
                await self._dissolve()
            case frames.Reset():
                await self._reset(order)
        return ()

    def close(self) -> None:
        """Close the link to the other engine."""
        if self._listener is not None:
            self._listener.close()
        if self._link is not None:
            self._link.close()
        self._link = self._listener = None

    async def _hold(self, closes: bool) -> None:
        core = self._engine.core
        if core.recovery.active:
            raise EngineUnavailableError("a step has failed and its requests are being tried")
        self.closed = closes
        await self._engine.hold()
        if core.recovery.active:
            raise EngineUnavailableError("a step has failed and its requests are being tried")

    async def _meet(self, path: str, listens: bool) -> None:
        """Listen or connect. The listening engine gets its order first, and accepts during a later order."""
        if listens:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen(1)
            self._listener.settimeout(MEET_SECONDS)
            return
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(MEET_SECONDS)
        await self._engine.aside(sock.connect, path)
        self._link = Link(sock)

    def _needed_link(self) -> Link:
        if self._link is None:
            if self._listener is None:
                raise LinkLostError("there is no link")
            sock, _ = self._listener.accept()  # the other side has connected already
            self._listener.close()
            self._listener, self._link = None, Link(sock)
        return self._link

    def _stall(self, num_units: int) -> tuple[Past, ...]:
        moves = self._engine.moves
        names = [request.request_id for request in moves.open_requests()]
        found = {name: moves.stall(name, num_units) for name in names}
        return tuple(Past(name, *held) for name, held in found.items() if held is not None)

    def _detach(self) -> tuple[Past, ...]:
        """Detach the gateway's requests. Requests of the engine itself stay and start over."""
        engine, pasts = self._engine, []
        for found in engine.moves.open_requests():
            request_id = found.request_id
            if not engine.serves(request_id, self._sink):
                engine.moves.start_over(request_id)
                continue
            units = engine.moves.units_of(request_id)
            moved = engine.detach(request_id)
            if moved.num_tokens:
                needed = 2 * -(-moved.num_tokens // engine.core.config.block_size)
                pasts.append(Past(request_id, moved.num_tokens, units[:needed]))
        return tuple(pasts)

    def _exchange(self, order: frames.Reform, link: Link) -> None:
        self._staged = {}
        for part in order.keeps:
            self._stage(part, self._read(part))
        if order.first:
            self._give(order.gives, link)
        for part in order.gets:
            self._stage(part, bytes(link.receive()))
        if not order.first:
            self._give(order.gives, link)

    def _stage(self, part: Part, data: bytes) -> None:
        self._staged.setdefault(part.request_id, []).append((range(*part.layers), data))

    def _read(self, part: Part) -> bytes:
        return self._runner.read_past(part.units, range(*part.layers))

    def _give(self, parts: Sequence[Part], link: Link) -> None:
        for part in parts:
            link.send(self._read(part))

    async def _reform(self, order: frames.Reform) -> None:
        engine = self._engine
        await engine.aside(self._exchange, order, self._needed_link())
        engine.moves.resize_cache(order.num_units if order.schedules else 0)
        if order.layers is None:
            await engine.aside(self._runner.restore, order.num_units)
        else:
            await engine.aside(self._runner.drop, range(*order.layers), order.num_units)

    def _attach(self, requests: Sequence[tuple[EngineRequest, int]]) -> list[Past]:
        placed, engine = [], self._engine
        for request, num_tokens in requests:
            name = request.request_id
            if engine.serves(name, self._sink):  # stopped, or submitted after `Detach`
                engine.moves.put_last(name)
            elif self._knows(name) or name in self._aborted:
                continue  # about to be queued, or aborted
            elif engine.attach(MovedRequest(request, num_tokens), self._sink):
                needed = 2 * -(-num_tokens // engine.core.config.block_size)
                placed.append(Past(name, num_tokens, engine.moves.units_of(name)[:needed]))
        return placed

    def _write(self, pasts: Sequence[Past]) -> None:
        staged, self._staged = self._staged, {}
        for past in pasts:
            for layers, data in staged.pop(past.request_id):
                self._runner.write_past(past.units, layers, data)

    async def _deliver(self, own: Sequence[Past], attached: Sequence[Past]) -> None:
        """Complete the pasts of stalled requests on both engines, one by one, between steps of other requests."""
        engine, staged = self._engine, self._staged
        self._staged = {}
        stalled = {past.request_id for past in (*own, *attached)}
        for past in (*own, *attached):
            left = [each.request_id for each in engine.moves.open_requests() if each.request_id in stalled]
            held = {unit for name in left for unit in engine.moves.units_of(name)}
            parts = staged.pop(past.request_id, None)
            gone = past.request_id not in left  # it has ended, and its units may be in use again
            units = () if gone else past.units
            if gone and not held.isdisjoint(past.units):
                raise EngineUnavailableError("a request has ended whose units other stalled requests share")
            if parts is None:
                await engine.aside(self._runner.fetch, past.request_id, units)
            elif not gone:
                for layers, data in parts:
                    await engine.aside(self._runner.hand_over, units, layers, data)
            stalled.discard(past.request_id)
            if units:
                engine.arrived(past.request_id)

    async def _go(self, role: str, pasts: Sequence[Past]) -> None:
        engine = self._engine
        self.role, engine.core.state.staged = role, role == LEADER
        if role == FOLLOWER:
            self._follow(self._needed_link())
            return
        if role == LEADER:
            await engine.aside(self._runner.lead, self._needed_link(), engine.core.state.model)
        else:
            await engine.aside(self._write, pasts)
            self.close()
            self.closed = False
        for past in pasts:
            engine.moves.arrived(past.request_id)
        engine.go()

    def _follow(self, link: Link) -> None:
        loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        ended = self._ended

        def follow() -> None:
            lost = False
            try:
                self._runner.follow(link, self._staged)
            except LinkLostError:
                lost = True
            except Exception:
                log.exception("a stage of the pipeline failed")
                lost = True
                link.close()  # unblocks the leader
            loop.call_soon_threadsafe(self._on_followed, ended, lost)

        self._following = threading.Thread(target=follow, name="tidemill-stage", daemon=True)
        self._following.start()

    def _on_followed(self, ended: asyncio.Event, lost: bool) -> None:
        ended.set()
        if lost and ended is self._ended and self.role == FOLLOWER:
            self._parted()

    async def _retire(self, num_units: int) -> tuple[Past, ...]:
        moves, pool = self._engine.moves, self._engine.core.state.pool
        pool.shrink(max(0, self._engine.load().num_units - num_units))
        for _ in range(RETIRE_LOOKS):
            if not pool.num_retiring_units:
                return ()
            if self._num_orders > 1:  # a reset is waiting
                break
            await asyncio.sleep(LOOK_SECONDS)
        held = [(each.request_id, moves.units_of(each.request_id)) for each in moves.open_requests()]
        return tuple(Past(name, 0, units) for name, units in held if units and max(units) >= num_units)

    async def _dissolve(self) -> None:
        if self.role == LEADER:
            await self._engine.aside(self._runner.end_lead)
        elif self.role == FOLLOWER:
            await self._ended.wait()

    async def _reset(self, order: frames.Reset) -> None:
        engine, moves = self._engine, self._engine.moves
        if self.role == FOLLOWER:
            await self._ended.wait()
        await engine.hold()
        for found in moves.open_requests():
            moves.start_over(found.request_id)
        self._staged = {}
        moves.resize_cache(0)
        await engine.aside(self._runner.restore, order.num_units)
        moves.resize_cache(order.num_units)
        self.role, self.closed, engine.core.state.staged = WHOLE, False, False
        engine.go()
        for request in order.requests:
            if not self._knows(request.request_id) and request.request_id not in self._aborted:
                self._resume(request)
