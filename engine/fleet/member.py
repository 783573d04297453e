"""One engine of several: what the fleet asks of it, and what a router is told of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from engine.api import EngineClient, EngineRequest, EngineState, EngineStats, EngineView, LoadReport, RequestClass
from engine.fleet.harvest import Harvest
from engine.fleet.prefixes import PrefixMemory
from engine.fleet.routing import EngineLoad
from engine.process import frames
from engine.process.regroup import Regrouping
from engine.process.requests import OpenRequest


class FleetEngine(EngineClient, Protocol):
    """An engine that can end, come back, and hand on what it had not begun; see `engine.process.client`."""

    @property
    def is_up(self) -> bool: ...

    @property
    def report(self) -> LoadReport | None: ...

    @property
    def unreported(self) -> Iterable[EngineRequest]: ...

    @property
    def num_offline(self) -> int: ...

    @property
    def num_online(self) -> int: ...

    @property
    def regroup(self) -> Regrouping: ...

    def holds(self, request_id: str) -> bool: ...

    def take_movable(self) -> list[OpenRequest]: ...

    def adopt(self, entries: Sequence[OpenRequest]) -> None: ...

    def load(self, planned: Callable[[frames.Planned], None]) -> None: ...

    def discard(self) -> None: ...


class Member:
    """`routed`: requests that it was given; `moved`: that were taken from it because its process was gone; `leaves`: it
    is about to end, and is given nothing new; `away`: it computes for another one, or is about to."""

    def __init__(self, number: int, engine: FleetEngine) -> None:
        self.number = number
        self.engine = engine
        self.prefixes = PrefixMemory()
        self.harvest = Harvest()
        self.leaves = self.away = False
        self.routed = 0
        self.moved = 0

    @property
    def block_size(self) -> int:
        """Of the blocks that prompts may share; 0: they share none."""
        return self.engine.info.block_size if self.engine.info.shares_prefixes else 0

    @property
    def is_well(self) -> bool:
        """Whether it takes requests and nothing is wrong with it."""
        return self.engine.is_up and self.engine.state is EngineState.READY

    def hears(self) -> None:
        """Take note of what the engine has said since."""
        self.harvest.hear(self.engine.report)

    def give(self, requests: Sequence[EngineRequest], chain: Sequence[int]) -> None:
        """These go to it; `chain`: of their prompt."""
        self.routed += len(requests)
        info = self.engine.info
        self.prefixes.add(chain, info.cache_tokens // info.block_size if info.block_size else 0)

    def lose_cache(self) -> None:
        """Its process is gone, and the cache with it, or it has been laid out anew."""
        self.prefixes.clear()

    def view(self, stats: EngineStats, partner: int | None = None) -> EngineView:
        engine = self.engine
        return EngineView(
            self.number, engine.state, engine.trouble, self.routed, self.moved, self.harvest.rate, stats,
            partner,
        )  # fmt: skip


def online_load(number: int, report: LoadReport | None, unreported: Iterable[EngineRequest]) -> EngineLoad:
    """What an engine said last, and what it was given since: nothing is assumed to have ended meanwhile."""
    report = report or LoadReport()
    prompts = [len(r.prompt_token_ids) for r in unreported if r.request_class is RequestClass.ONLINE]
    return EngineLoad(
        engine=number,
        queued_tokens=report.queued_tokens + sum(prompts),
        queued_units=report.queued_units + sum(-(-tokens // report.tokens_per_unit) for tokens in prompts),
        queued_requests=report.queued_requests + len(prompts),
        running=report.running,
        free_units=report.available_units,
        pool_units=report.num_units,
        tokens_per_unit=report.tokens_per_unit,
        tokens_per_step=report.tokens_per_step,
        mean_input=report.mean_input,
        mean_output=report.mean_output,
        step_seconds=report.step_seconds,
    )


def offline_load(number: int, held: int, share: float) -> EngineLoad:
    """Of lines: how many it holds, and how fast it gets through them."""
    return EngineLoad(
        engine=number, queued_requests=held, queued_tokens=held, tokens_per_step=1, step_seconds=1.0 / share
    )


def hits_of(members: Iterable[Member], chain: Sequence[int]) -> Mapping[int, int]:
    """Tokens of a prompt that each engine should have in its prefix cache."""
    return {member.number: member.prefixes.num_hits(chain) * member.block_size for member in members}
