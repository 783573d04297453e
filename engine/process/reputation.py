"""Remember the suspicions against requests that have left, so that a resubmitted request causes no further deaths.

A request that ended an engine process may be aborted before that is proven, and be submitted again under another id. It
is recognized by a digest of its prompt and sampling parameters, or of its grammar if the process died while the grammar
was compiled. The digests include the tenant's cache salt.
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
    """Suspicions by content, each kept for `REMEMBERED_SECONDS`."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def remember(self, request: EngineRequest, suspicion: Suspicion, now: float, *, guilty: bool = False) -> None:
        """Store the suspicion against a request that has left or is proven `guilty`."""
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
        """Return the suspicion against a request's content and whether it is guilty; None if there is none."""
        for digest in self._digests(request):
            entry = self._entries.get(digest)
            if entry is not None and entry.until < now:
                del self._entries[digest]
            elif entry is not None:
                return replace(entry.suspicion), entry.guilty
        return None

    def forget(self, request: EngineRequest) -> None:
        """Forget the content of an acquitted request."""
        for digest in self._digests(request):
            self._entries.pop(digest, None)

    def clear(self) -> None:
        """Forget all content."""
        self._entries.clear()

    def _digests(self, request: EngineRequest) -> Iterator[bytes]:
        if self._entries:
            yield _of_prompt(request)
            if request.sampling.grammar is not None:
                yield _of_grammar(request)


def _of_prompt(request: EngineRequest) -> bytes:
    sampling = replace(request.sampling, seed=0)  # the gateway draws a seed per request
    facts = (request.cache_salt, request.adapter, request.pooling, sampling)
    digest = blake2b(repr(facts).encode(), digest_size=16)
    for start in range(0, len(request.prompt_token_ids), 1 << 16):
        digest.update(repr(request.prompt_token_ids[start : start + (1 << 16)]).encode())
    return digest.digest()


def _of_grammar(request: EngineRequest) -> bytes:
    return blake2b(repr((request.cache_salt, request.sampling.grammar)).encode(), digest_size=16).digest()
