"""By which names the server may be addressed, so that a web page in a browser on this machine cannot.

A page may have its own name resolve to this machine (DNS rebinding): its requests then carry that name in `Host`. An
address in its place cannot be rebound. Knows nothing of HTTP but the form of `Host` and `Origin`.
"""

import ipaddress
import re
from collections.abc import Iterable

from engine.refusals import is_loopback

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def host_name(authority: str) -> str | None:
    """The host in `name:port`, in one spelling; None where it has no such form."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].strip("[]").rstrip(".") if match else None


class HostNames:
    """`bound`: the address that the server listens on; `allowed`: further names, or `*` for any.

    Beyond loopback the names by which others know the machine cannot be guessed, and keys are required: no page has
    one. There any name will do unless some are said to be allowed.
    """

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        self._allowed = {name.lower().strip("[]").rstrip(".") for name in allowed}
        self._names = {*self._allowed, bound.lower().strip("[]"), "localhost"}
        self._is_local = is_loopback(bound)
        self._any = "*" in self._allowed or not (self._is_local or self._allowed)

    def know(self, authority: str) -> bool:
        """Whether a request that names this host is meant for this server."""
        name = host_name(authority)
        if name is None:
            return False
        if self._any or name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_local

    def trust(self, origin: str, authority: str) -> bool:
        """Whether a page of this origin came from this server (`authority`: the request's host) or from a name of its
        own before a proxy."""
        scheme, found, place = origin.lower().partition("://")
        if not found or host_name(place) is None:
            return False
        default = ":" + _DEFAULT_PORTS.get(scheme, "")
        same = place.removesuffix(default) == authority.lower().removesuffix(default)
        return same or host_name(place) in self._allowed
