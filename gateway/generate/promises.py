"""Derives the promise to a request from its headers, body and API key and the classes of `--slo`.

The class is the first of: `tidemill.class` in the body, the header of llm-d's gateway that names an objective, the
service tiers `priority` and `scale` (class `premium`), the first class of the key. Limits are those of the class, or
those that the request states: headers as llm-d sends them, or the body. With an API key no limit is tighter than the
bound on the key's line or, without one, the limit of the class. A server without keys refuses limits below a part of
the class's; requests with tighter limits than their class are served by them and judged by those of the class.
"""

import functools
import math
from collections.abc import Collection, Mapping

from engine.errors import InvalidRequestError
from gateway.generate.wire import ModelBody
from gateway.http.errors import ApiError
from gateway.http.keys import Key
from predictor.promise import DEFAULT_CLASS, Promise
from predictor.slo import SLO

CLASS_HEADER = "x-gateway-inference-objective"
LIMITS = {
    "ttft": ("x-slo-ttft-ms", "ttft_ms"),
    "tbt": ("x-slo-tpot-ms", "tpot_ms"),
    "e2e": ("x-slo-e2e-ms", "e2e_ms"),
}
"""Header and body field of each limit, in milliseconds."""
PREMIUM = "premium"
PREMIUM_TIERS = ("priority", "scale")


def promise_of(headers: Mapping[str, str], body: ModelBody, key: Key | None, slo: SLO) -> Promise | None:
    """Return the promise to a request, or None if it is the one that the engine keeps by default.

    `key`: None if the server requires no keys. Raises InvalidRequestError for an unknown class or an invalid limit, and
    ApiError 403 for a class that the key does not have.
    """
    known = _promises(slo)
    usual = known[_class_of(headers, body, key, known)]
    ttft, tbt, e2e = (_limit(metric, headers, body, key, usual.limit(metric)) for metric in LIMITS)
    is_tighter = ttft < usual.ttft or tbt < usual.tbt or e2e < usual.e2e
    promise = Promise(usual.service, ttft, tbt, e2e, is_stated=key is None and is_tighter)
    return None if promise == known[DEFAULT_CLASS] and math.isinf(promise.e2e) else promise


LEAST_SECONDS = 1e-3
TIGHTEST = 10
"""Least limit that a request may state: absolute, and the class's divided by this. No model computes a token in less
time, and every step beside a request that is always late would have no room for offline work."""


@functools.lru_cache(maxsize=8)
def _promises(slo: SLO) -> dict[str, Promise]:
    """Return the promise of every class."""
    return {name: slo.promise(name) for name, _ in slo.by_class}


def _class_of(headers: Mapping[str, str], body: ModelBody, key: Key | None, known: Collection[str]) -> str:
    allowed = list(known) if key is None else [name for name in key.classes or (DEFAULT_CLASS,) if name in known]
    asked = body.tidemill.class_ if body.tidemill is not None else None
    if asked is not None:
        if asked not in known:
            raise InvalidRequestError(f"'tidemill.class' must be one of {', '.join(known)}.", param="tidemill.class")
        if asked not in allowed:
            message = f"This key may not use the class '{asked}'; it has {', '.join(allowed)}."
            raise ApiError(403, message, param="tidemill.class", code="class_forbidden")
        return asked
    named = headers.get(CLASS_HEADER)
    if named in allowed:
        return named
    if body.service_tier in PREMIUM_TIERS and PREMIUM in allowed:
        return PREMIUM
    return allowed[0] if key is not None and allowed else DEFAULT_CLASS


def _limit(metric: str, headers: Mapping[str, str], body: ModelBody, key: Key | None, usual: float) -> float:
    """Return a limit in seconds. `usual`: that of the class."""
    header, name = LIMITS[metric]
    stated = _milliseconds(header, headers[header]) if header in headers else None
    if stated is None and body.tidemill is not None:
        stated = getattr(body.tidemill, name)
    wanted = usual if stated is None else stated / 1e3
    if key is not None:
        return max(wanted, dict(key.bounds).get(metric, usual))
    least = max(LEAST_SECONDS, usual / TIGHTEST if usual < math.inf else 0.0)
    if wanted < least:
        param = header if header in headers else f"tidemill.{name}"
        raise InvalidRequestError(f"'{param}' must be at least {least * 1e3:g} on this server.", param=param)
    return wanted


def _milliseconds(header: str, text: str) -> float | None:
    """Return the value of a header; None for 0, which states no limit."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise InvalidRequestError(f"'{header}' must be a number of milliseconds.", param=header)
    return value or None
