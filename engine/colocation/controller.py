"""Joins what keeps the SLO: the keeper beside the core, the tuner of its budget, and what an earlier server learned.

The composition root's part that needs no torch; the only place that reads the calendar.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from engine.colocation.keeper import Colocation, initial_budget
from engine.colocation.load_store import LoadStore
from engine.colocation.refit import ModelRefit
from engine.colocation.replay import ReplayedServer, normal_noise
from engine.colocation.tuner import BudgetTuner
from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from predictor.online import OnlineModel
from predictor.profile import Profile
from predictor.slo import SLO

FILL_POLICY = "tidemill"
"""The policy that sizes offline work; HyGen's own, one flat budget, is for replays."""


def make_controller(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profile: Profile,
    slo: SLO,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[EngineCore, Colocation, BudgetTuner]:
    """Core, keeper and tuner for a profile. `folder`: where profiles are kept, and what is learned beside them."""
    model = OnlineModel.of(profile)
    scheduler = replace(scheduler, rho=profile.cache_costs.rho(scheduler.compact_tokens))
    core = EngineCore(scheduler, online_policy=config.online_policy, offline_policy=config.offline_policy, model=model)
    budget = initial_budget(slo, profile.model, FILL_POLICY)
    say(f"SLO {slo}; offline work may extend a step to {budget.latency_budget * 1e3:.0f} ms")
    server = ReplayedServer(
        profile.model,
        slo,
        scheduler,
        FILL_POLICY,
        config.online_policy,
        config.offline_policy,
        normal_noise(profile.held_out_mape),
    )
    promise = f"{slo}; {FILL_POLICY}, {config.online_policy}, {config.offline_policy}; {_limits(scheduler)}"
    store = LoadStore(folder, profile.key, promise)
    calendar = time.time() - time.monotonic()
    load, table = store.read(time.time(), say)
    colocation = Colocation(core, model, slo, budget, calendar=calendar, load=load)
    refit = ModelRefit(colocation, profile, folder / profile.key.filename())
    return core, colocation, BudgetTuner(colocation, server, table, store, refit=refit)


def _limits(scheduler: SchedulerConfig) -> str:
    """What bounds steps and queues; `rho` is measured and differs a little from time to time."""
    return ", ".join(f"{name} {value}" for name, value in asdict(scheduler).items() if name not in ("rho", "seed"))
