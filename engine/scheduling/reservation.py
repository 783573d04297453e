"""What lines at risk of missing their completion window are kept in one step (see `engine.reserve`)."""

from dataclasses import dataclass, field

from engine.api import Lane, RequestClass
from engine.request import Request
from engine.scheduling.state import SchedulerState
from predictor.limits import UNITS_PER_BLOCK


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is reserved in one step; everything is zero without a line at risk or without online work.

    `tokens`, `share`: of the step, left alone by prompts. `rows`, `units`: left free by online requests that start, so
    that a line at risk can. `protected`: running lines at risk that keep their place, as the one that may start next
    will, while an online request could be served beside them: `held` units in all.
    """

    share: float = 0.0
    tokens: int = 0
    rows: int = 0
    units: int = 0
    protected: frozenset[Request] = field(default_factory=frozenset)
    held: int = 0

    def seconds_beside(self, online: float) -> float:
        """Seconds that lines at risk may add to a step that takes `online` seconds without them."""
        return online * self.share / (1.0 - self.share)


NOTHING = Reservation()


def reservation_of(state: SchedulerState) -> Reservation:
    """What lines at risk may count on beside the online requests of now. One of them always has a row and memory,
    however small the share is, and more of them as far as the share goes."""
    config, running = state.config, state.running[RequestClass.OFFLINE]
    if not state.reserve or not state.has_online:
        return NOTHING
    at_risk = [request for request in running if request.spec.lane is Lane.AT_RISK]
    waiting = next(state.waiting_offline.candidates(Lane.AT_RISK), None)
    if not at_risk and waiting is None:
        return NOTHING
    max_rows = min(max(1, int(state.reserve * config.max_num_seqs)), config.max_num_seqs - 1)
    max_units, held = int(state.reserve * state.pool.num_units), 0
    protected: list[Request] = []
    for request in at_risk[:max_rows]:
        size = _units_of(state, request)
        if protected and held + size > max_units:
            break
        protected.append(request)
        held += size
    rows = units = 0
    if waiting is not None and len(protected) < max_rows:
        need = _units_of(state, waiting)
        if not protected or held + need <= max_units:
            rows, units, held = max_rows - len(protected), need + state.growth_reserve, held + need
            units += min(state.pool.num_cached_online_units, state.pool.num_units // 4)
    tokens = max(1, int(state.reserve * config.max_num_batched_tokens))
    return Reservation(state.reserve, tokens, rows, units, frozenset(protected), held)


def _units_of(state: SchedulerState, request: Request) -> int:
    """Units of all known tokens of a request and the next one."""
    return UNITS_PER_BLOCK * request.num_blocks(state.config.block_size)


def has_room_beside(state: SchedulerState, request: Request, reservation: Reservation) -> bool:
    """Whether an online request can be served beside what is reserved. One that fills the pool need not wait until
    no line is at risk any more."""
    return reservation.held + _units_of(state, request) <= state.pool.num_units
