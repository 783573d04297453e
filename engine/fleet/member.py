"""One engine of a fleet, and its load for a router."""

from collections.abc import Iterable, Mapping, Sequence

from engine.api import EngineRequest, EngineState, EngineStats, EngineView, LoadReport, RequestClass
from engine.fleet.harvest import Harvest
from engine.fleet.prefixes import PrefixMemory
from engine.fleet.routing import EngineLoad
from engine.process.client import EngineProcess


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

    def hears(self) -> None:
        """Update the offline rate from the last load report."""
        self.harvest.hear(self.engine.report)

    def give(self, requests: Sequence[EngineRequest], chain: Sequence[int]) -> None:
        """Record requests sent to the engine. `chain`: the hashes of their prompt (`prefix_chain`)."""
        self.routed += len(requests)
        info = self.engine.info
        self.prefixes.add(chain, info.cache_tokens // info.block_size if info.block_size else 0)

    def lose_cache(self) -> None:
        """Forget the prefixes, because the process has ended or its cache was rebuilt."""
        self.prefixes.clear()

    def view(self, stats: EngineStats, partner: int | None = None) -> EngineView:
        engine = self.engine
        return EngineView(
            self.number, engine.state, engine.trouble, self.routed, self.moved, self.harvest.rate, stats,
            partner,
        )  # fmt: skip


def online_load(number: int, report: LoadReport | None, unreported: Iterable[EngineRequest]) -> EngineLoad:
    """Return the load of the last report plus the requests sent since, as if no request had ended since then."""
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
    """Return the offline load: `held` batch lines at a speed in proportion to `share`."""
    return EngineLoad(
        engine=number, queued_requests=held, queued_tokens=held, tokens_per_step=1, step_seconds=1.0 / share
    )


def hits_of(members: Iterable[Member], chain: Sequence[int]) -> Mapping[int, int]:
    """Return, by engine, the tokens of a prompt that its prefix cache is expected to hold."""
    return {member.number: member.prefixes.num_hits(chain) * member.block_size for member in members}
