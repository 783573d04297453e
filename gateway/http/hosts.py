"""Validation of `Host` and `Origin` against requests from foreign web pages.

With DNS rebinding a page makes its own name resolve to this machine; its requests carry that name in `Host`. IP
addresses cannot be rebound.
"""

import ipaddress
import re
from collections.abc import Iterable

from engine.refusals import is_loopback

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def host_name(authority: str) -> str | None:
    """Return the normalized host of `name:port`, or None if the text is malformed."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return match[1].strip("[]").rstrip(".") if match else None


class HostNames:
    """Names under which the server may be addressed.

    A server that listens beyond loopback accepts any name unless `allowed` is given: its names are unknown, and it
    requires API keys, which foreign pages do not have.

    Args:
        bound: address that the server listens on.
        allowed: further names, or `*` for any.
    """

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        self._allowed = {name.lower().strip("[]").rstrip(".") for name in allowed}
        self._names = {*self._allowed, bound.lower().strip("[]"), "localhost"}
        self._is_local = is_loopback(bound)
        self._any = "*" in self._allowed or not (self._is_local or self._allowed)

    def know(self, authority: str) -> bool:
        """Return whether `authority` (host and port) addresses this server."""
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
        """Return whether a page of `origin` was served by this server (`authority`: the request's host) or under one of
        the allowed names."""
        scheme, found, place = origin.lower().partition("://")
        if not found or host_name(place) is None:
            return False
        default = ":" + _DEFAULT_PORTS.get(scheme, "")
        same = place.removesuffix(default) == authority.lower().removesuffix(default)
        return same or host_name(place) in self._allowed
