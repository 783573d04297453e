"""Service that tenants with online requests have received, and the order of tenants (`FairShare`).

A request is charged when it first starts: for its missing prompt tokens and the mean output of recent answers. At its
end the charge is corrected to the actual cost. `engine.scheduling.laxity` orders requests within a tenant.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from engine.api import TokenCosts
from engine.request import Request, RequestStatus
from engine.scheduling.fair_share import FairShare, FairWalk

FORGETTING = 0.05
"""Weight of the newest answer in the mean answer length."""


class OnlineShare:
    """Accounts of tenants with online requests. `costs` gives the price of tokens.

    Attributes:
        let_in: Requests for which a row was freed.
        moved: Requests that lost their row to another tenant.
    """

    def __init__(self, costs: TokenCosts) -> None:
        self._costs = costs
        self._share = FairShare()
        self._num_requests: Counter[str] = Counter()
        self._charged: dict[str, float | None] = {}
        self._mean_output = 0.0
        self.let_in: set[Request] = set()
        self.moved: set[Request] = set()

    @property
    def is_contested(self) -> bool:
        """Return whether more than one tenant has requests. Otherwise the accounts have no effect."""
        return len(self._num_requests) > 1

    def waiting(self, running: Mapping[str, int]) -> list[str]:
        """Return the tenants with more requests than `running` counts for them."""
        return [tenant for tenant, count in self._num_requests.items() if count > running.get(tenant, 0)]

    def enter(self, request: Request) -> None:
        """Record a queued request."""
        self._num_requests[request.spec.tenant] += 1
        self._charged[request.request_id] = None
        self._share.enter(request.spec.tenant)

    def start(self, request: Request) -> None:
        """Charge a request that runs for the first time."""
        if self._is_owed(request):
            self._charged[request.request_id] = cost = self.price(request)
            self._share.charge(request.spec.tenant, cost)

    def end(self, request: Request) -> None:
        """Settle a request that ended in any state. The canary never entered and is ignored."""
        self.let_in.discard(request)
        self.moved.discard(request)
        if request.request_id not in self._charged:
            return
        tenant, charged = request.spec.tenant, self._charged.pop(request.request_id)
        if charged is not None:
            self._mean_output += FORGETTING * (request.num_output_tokens - self._mean_output)
            self._share.charge(tenant, self._actual(request) - charged)
        self._num_requests[tenant] -= 1
        if not self._num_requests[tenant]:
            del self._num_requests[tenant]
        self._share.leave(tenant)

    def with_arrival(self, tenant: str) -> "OnlineShare":
        """Return a read-only view of the accounts with one more request of `tenant`."""
        view = OnlineShare(self._costs)
        view._share = self._share.copy()
        view._share.enter(tenant)
        view._num_requests = self._num_requests + Counter((tenant,))
        view._charged, view._mean_output = self._charged, self._mean_output
        return view

    def by_standing(self, tenants: Iterable[str]) -> list[str]:
        """Sort tenants with requests, the next to be served first."""
        return sorted(tenants, key=self._share.standing)

    def received(self, tenant: str, running: Iterable[Request]) -> float:
        """Return the service that a tenant has received, or -inf if it has no requests.

        Includes the service of its `running` requests beyond their charge.
        """
        beyond = 0.0
        for request in running:
            if request.spec.tenant == tenant and (charged := self._charged.get(request.request_id)) is not None:
                beyond += max(0.0, self._actual(request) - charged)
        return self._share.service(tenant) + beyond if tenant in self._num_requests else -math.inf

    def walk(self, groups: Mapping[str, Iterable[Request]]) -> FairWalk:
        """Simulate the order in which the tenants in `groups` would be served, each request at its `price`.

        Requests that already started were charged before, so their charge is deducted first.
        """
        paid = {
            tenant: sum(self._charged.get(r.request_id) or 0.0 for r in group if r.status is not RequestStatus.WAITING)
            for tenant, group in groups.items()
        }
        return FairWalk(self._share, groups, paid)

    def price(self, request: Request) -> float:
        """Return the charge of a request, or its charge if it started now."""
        if charged := self._charged.get(request.request_id):
            return charged
        return self._costs.of(request.num_missing_tokens, min(self._mean_output, request.spec.sampling.max_tokens))

    def _actual(self, request: Request) -> float:
        """Return the cost of a request so far."""
        return self._costs.of(request.num_prompt_tokens - request.num_cached_tokens, request.num_output_tokens)

    def _is_owed(self, request: Request) -> bool:
        return self._charged.get(request.request_id, 0.0) is None


def by_tenant(requests: Iterable[Request]) -> dict[str, list[Request]]:
    """Group requests by tenant, in the given order."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.spec.tenant, []).append(request)
    return groups
