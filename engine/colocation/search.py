"""Finds the offline budget for a workload and a latency model by replay on a virtual clock (HyGen §4.2, and ours).

Torch-free and deterministic for equal arguments. The server runs it in a child process (`search_child`).
"""

from collections.abc import Callable, Sequence

from engine.colocation.replay import ReplayedServer, Workload, replay
from engine.limits import SchedulerConfig
from predictor.budget import BudgetParams
from predictor.budget_search import MAX_CONFIRMATIONS, SearchResult, search_budget
from predictor.features import BatchFeatures
from predictor.model import LatencyModel


def step_range(model: LatencyModel, config: SchedulerConfig) -> tuple[float, float]:
    """Return the seconds of the smallest step and twice those of a full one: the search range of L."""
    smallest, largest = BatchFeatures(model.reach), BatchFeatures(model.reach)
    smallest.add_decodes(1, 1)
    largest.add_chunk(0, max(2, config.max_num_batched_tokens))
    low = model.predict(smallest)
    return low, max(2.0 * model.predict(largest), 2.0 * low)


def find_budget(
    first: Workload, others: Sequence[Workload], server: ReplayedServer, max_evaluations: int = 24
) -> SearchResult:
    """Search on the first window and confirm on the others. `max_evaluations`: for a single other window."""

    def evaluate_on(workload: Workload) -> Callable[[BudgetParams], dict[str, float]]:
        return lambda budget: replay(workload, server, budget)

    return search_budget(
        evaluate_on(first),
        server.slo,
        step_range(server.model, server.config),
        server.fill_policy,
        confirm=[evaluate_on(other) for other in others],
        max_evaluations=max_evaluations + (MAX_CONFIRMATIONS + 1) * max(0, len(others) - 1),
    )
