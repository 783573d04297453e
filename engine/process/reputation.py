"""What is held against requests that have left, by their content: sending a killer once more costs no further deaths.

A request that ended an engine process may leave before that is proven, and come again under another id. Its content is
known by digests: of prompt and sampling, and of its grammar if it died while that was prepared. Tenants share none.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b

from engine.api import EngineRequest
from engine.process.suspects import Suspicion

REMEMBERED_SECONDS = 600.0
MAX_REMEMBERED = 1024


@dataclass(slots=True)
class _Entry:
    until: float
    suspicion: Suspicion
    guilty: bool


class Reputation:
    """The suspicions of the last minutes; those of unknown content are None."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def remember(self, request: EngineRequest, suspicion: Suspicion, now: float, *, guilty: bool = False) -> None:
        """Keep what is held against a request that has left, or that is proven to be `guilty`."""
        died_preparing = suspicion.passes_at <= 1 and request.sampling.grammar is not None
        digest = _of_grammar(request) if died_preparing else _of_prompt(request)
        known = self._entries.get(digest)
        if known is not None and known.guilty and known.until >= now and not guilty:
            return
        self._entries[digest] = _Entry(now + REMEMBERED_SECONDS, suspicion, guilty)
        self._entries.move_to_end(digest)
        if len(self._entries) > MAX_REMEMBERED:
            self._entries.popitem(last=False)

    def find(self, request: EngineRequest, now: float) -> tuple[Suspicion, bool] | None:
        """Return what is held against the content of a request, and whether it is guilty."""
        for digest in self._digests(request):
            entry = self._entries.get(digest)
            if entry is not None and entry.until < now:
                del self._entries[digest]
            elif entry is not None:
                return replace(entry.suspicion), entry.guilty
        return None

    def forget(self, request: EngineRequest) -> None:
        """The content is acquitted: a request of it got past the place."""
        for digest in self._digests(request):
            self._entries.pop(digest, None)

    def clear(self) -> None:
        """Other weights or another engine run now."""
        self._entries.clear()

    def _digests(self, request: EngineRequest) -> Iterator[bytes]:
        if self._entries:
            yield _of_prompt(request)
            if request.sampling.grammar is not None:
                yield _of_grammar(request)


def _of_prompt(request: EngineRequest) -> bytes:
    sampling = replace(request.sampling, seed=0)  # the edge draws one for each request
    facts = (request.cache_salt, request.adapter, request.pooling, sampling)
    digest = blake2b(repr(facts).encode(), digest_size=16)
    for start in range(0, len(request.prompt_token_ids), 1 << 16):
        digest.update(repr(request.prompt_token_ids[start : start + (1 << 16)]).encode())
    return digest.digest()


def _of_grammar(request: EngineRequest) -> bytes:
    return blake2b(repr((request.cache_salt, request.sampling.grammar)).encode(), digest_size=16).digest()
