"""Metrics by tenant: tokens, ended requests, refusals, and requests in the engine and waiting."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.telemetry.account import Account

MAX_TENANTS = 100
OTHERS = "+others"
"""Label of all tenants after the first MAX_TENANTS; no tenant can have this name."""


class TenantCollector(Collector):
    """Counters since the start, of online and offline requests. Batch lines count for the tenant of their batch.

    Args:
        refused: requests that exceeded their tenant's limits, by tenant.
        loads: the current requests in the engine, their tokens, and the waiting requests, by tenant.
    """

    def __init__(self, refused: Mapping[str, int], loads: Callable[[], Mapping[str, tuple[int, int, int]]]) -> None:
        self._refused, self._loads = refused, loads
        self._names: set[str] = set()
        self._tokens: Counter[tuple[str, str, str]] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()

    def observe_end(self, account: Account) -> None:
        """Count an ended choice."""
        name, kind = self._label(account.request.tenant), account.request.request_class.value
        self._ended[name, kind] += 1
        self._tokens[name, kind, "prompt"] += account.num_prompt_tokens
        self._tokens[name, kind, "output"] += account.num_tokens

    def _label(self, tenant: str) -> str:
        if tenant not in self._names and len(self._names) >= MAX_TENANTS:
            return OTHERS
        self._names.add(tenant)
        return tenant

    def collect(self) -> Iterator[Metric]:
        text = "Prompt and output tokens of ended requests by tenant."
        tokens = CounterMetricFamily("tidemill_tenant_tokens", text, labels=["tenant", "class", "kind"])
        for labels, count in list(self._tokens.items()):
            tokens.add_metric(labels, count)
        text = "Ended requests by tenant."
        ended = CounterMetricFamily("tidemill_tenant_requests", text, labels=["tenant", "class"])
        for ends, count in list(self._ended.items()):
            ended.add_metric(ends, count)
        text = "Requests that exceeded their tenant's limits (429)."
        refused = CounterMetricFamily("tidemill_tenant_refused_requests", text, labels=["tenant"])
        for name, count in _summed((self._label(name), count) for name, count in list(self._refused.items())):
            refused.add_metric([name], count)
        text = "Requests of a tenant in the engine and waiting for its limits."
        present = GaugeMetricFamily("tidemill_tenant_present_requests", text, labels=["tenant", "state"])
        loads = self._loads()
        for state, at in (("running", 0), ("waiting", 2)):
            for name, count in _summed((self._label(name), load[at]) for name, load in loads.items()):
                present.add_metric([name, state], count)
        yield from (tokens, ended, refused, present)


def _summed(pairs: Iterator[tuple[str, int]]) -> list[tuple[str, int]]:
    sums: Counter[str] = Counter()
    for name, count in pairs:
        sums[name] += count
    return list(sums.items())
