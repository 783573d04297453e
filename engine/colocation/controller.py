"""Creates the SLO controller: the core, its keeper, the budget tuner and the stored knowledge of an earlier server.

Torch-free part of the composition root, and the only module that reads the calendar time.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from engine.colocation.keeper import Colocation, initial_budget
from engine.colocation.refit import ModelRefit
from engine.colocation.replay import ReplayedServer, normal_noise
from engine.colocation.tuner import BudgetTuner, LoadStore
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.limits import SchedulerConfig
from predictor.online import OnlineModel
from predictor.profile import Profile
from predictor.slo import SLO


def make_controller(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    profile: Profile,
    slo: SLO,
    folder: Path,
    say: Callable[[str], None],
) -> tuple[EngineCore, Colocation, BudgetTuner]:
    """Return core, keeper and tuner for a profile. `folder` stores profiles, the learned load and the budgets."""
    model = OnlineModel(profile.model, profile.held_out_mape)
    scheduler = replace(scheduler, rho=profile.cache_costs.rho(scheduler.compact_tokens))
    core = EngineCore(scheduler, online_policy=config.online_policy, model=model)
    budget = initial_budget(slo, profile.model)
    say(f"SLO {slo}; offline work may extend a step to {budget.latency_budget * 1e3:.0f} ms")
    noise = normal_noise(profile.held_out_mape)
    server = ReplayedServer(profile.model, slo, scheduler, config.online_policy, noise)
    promise = f"{slo}; {config.online_policy}; {_limits(scheduler)}"
    store = LoadStore(folder, profile.key, promise)
    calendar = time.time() - time.monotonic()
    load, table = store.read(time.time(), say)
    colocation = Colocation(core, model, slo, budget, calendar=calendar, load=load)
    refit = ModelRefit(colocation, profile, folder / profile.key.filename())
    return core, colocation, BudgetTuner(colocation, server, table, store, refit=refit)


def _limits(scheduler: SchedulerConfig) -> str:
    """Return the limits of steps and queues as text, without `rho`, which is measured and varies slightly."""
    return ", ".join(f"{name} {value}" for name, value in asdict(scheduler).items() if name not in ("rho", "seed"))
