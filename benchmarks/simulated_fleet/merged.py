"""A fleet without a router: one queue, from which every engine takes what it can start.

No request is bound to an engine before its first step there, so none waits behind another while a second engine would
start it: what the best of routers could reach by choosing alone. Not to be had live, where a prompt must have been sent
before a step can begin with it.
"""

from collections.abc import Iterable

from benchmarks.simulated_fleet.fleet import FleetDriver, Server
from benchmarks.simulated_fleet.routers import ROUTERS
from engine.request import RequestStatus
from engine.virtual import Arrival, VirtualRecord


class MergedDriver(FleetDriver):
    """Before each step of an engine, all that waits is put into its queue, for its own policy to choose from; what it
    has not started is taken out again. Idle engines are asked in the order of their speed."""

    def __init__(self, servers: Iterable[Server], arrivals: Iterable[Arrival]) -> None:
        super().__init__(servers, ROUTERS["round-robin"], arrivals)  # which is never asked

    def _route(self, arrival: Arrival) -> None:
        record = VirtualRecord(arrival)
        self.run_data.online.append(record)
        self.records[arrival.request.request_id] = record
        self._held.append(arrival)
        for server in sorted(self.servers.values(), key=lambda server: server.step_seconds):
            self.pump(server)

    def pump(self, server: Server) -> None:
        """Start what steps the server can start now, with anything that waits."""
        if self.now < server.free_at or server.flights:
            return
        core, offered = server.core, self._held
        for arrival in offered:
            core.add_request(arrival.request, arrival.at)
        super().pump(server)
        queue = core.state.waiting_online
        waiting = {request.request_id for request in queue if request.status is RequestStatus.WAITING}
        self._held = [arrival for arrival in offered if arrival.request.request_id in waiting]
        for arrival in offered:
            if arrival.request.request_id in waiting:
                core.abort(arrival.request.request_id, self.now)
            else:
                self.placed[arrival.request.request_id] = server.number
