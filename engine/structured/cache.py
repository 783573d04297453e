"""Cache of compiled grammars and of refusals, limited in memory and separate for each tenant."""

from collections import OrderedDict, defaultdict
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from engine.errors import QueueFullError
from engine.forms import Grammar

if TYPE_CHECKING:
    from engine.structured.compiler import CompiledGrammar

MAX_BYTES = 2**30
MAX_REFUSALS = 4096


class GrammarCache:
    """Compiled grammars by content and tenant.

    A grammar held by a request is found even after eviction. `max_bytes` bounds cached and held grammars together.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._alive: WeakValueDictionary[bytes, CompiledGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[bytes, tuple[str, CompiledGrammar]] = OrderedDict()
        self._lock = RLock()

    def find(self, grammar: Grammar) -> "CompiledGrammar | None":
        """Return the grammar if it is ready."""
        key = grammar.key()
        with self._lock:
            found = self._alive.get(key)
            if found is None or found.spoiled:
                self._kept.pop(key, None)
                return None
            if key in self._kept:
                self._kept.move_to_end(key)
            return found

    def keep(self, grammar: Grammar, compiled: "CompiledGrammar") -> None:
        """Add a grammar; evict the least recently used grammars of the tenant with the largest share."""
        key = grammar.key()
        with self._lock:
            self._alive[key] = compiled
            self._kept.pop(key, None)
            self._kept[key] = grammar.tenant, compiled
            while len(self._kept) > 1 and self._num_bytes() > self._max_bytes:
                self._evict(but=key)

    def make_room(self, cost: int) -> None:
        """Evict until `cost` bytes fit. Raises QueueFullError if running requests hold too much."""
        with self._lock:
            while self._kept and self._num_bytes() + cost > self._max_bytes:
                self._evict()
            if self._alive and self._num_bytes() + cost > self._max_bytes:
                raise QueueFullError("The grammars of running requests fill the memory for grammars.", retry_after=5.0)

    def _num_bytes(self) -> int:
        return sum(compiled.cost for compiled in self._alive.values())

    def _evict(self, but: bytes = b"") -> None:
        by_tenant: defaultdict[str, int] = defaultdict(int)
        for key, (tenant, compiled) in self._kept.items():
            by_tenant[tenant] += compiled.cost if key != but else 0
        largest = max(by_tenant, key=lambda tenant: by_tenant[tenant])
        del self._kept[next(key for key, (tenant, _) in self._kept.items() if tenant == largest and key != but)]


class Refusals:
    """Reasons of refused grammars, by content and tenant; beyond `size`, the oldest are dropped."""

    def __init__(self, size: int = MAX_REFUSALS) -> None:
        self._size = size
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    def find(self, grammar: Grammar) -> str | None:
        """Return the reason if the grammar was refused."""
        return self._reasons.get(grammar.key())

    def add(self, grammar: Grammar, reason: str) -> None:
        """Record that the grammar is refused."""
        self._reasons[grammar.key()] = reason
        while len(self._reasons) > self._size:
            self._reasons.popitem(last=False)
