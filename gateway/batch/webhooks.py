"""Webhooks of batches, in the convention of Standard Webhooks that OpenAI uses: signed, and never redirected.

The host is resolved once per attempt. All of its addresses must be public, or in a network that the operator allows;
the request then goes to one of these addresses, so a second DNS answer cannot lead it elsewhere.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx
import orjson

from engine import __version__
from engine.errors import ConfigError
from gateway.store.objects import Notice

SECRETS, HOSTS = "TIDEMILL_WEBHOOK_SECRET", "TIDEMILL_WEBHOOK_HOSTS"
"""Environment variables: secrets (`whsec_...`), and the hosts and networks that webhooks may use; comma-separated."""
SECRET_PREFIX, LEAST_SECRET_BYTES = "whsec_", 24
ATTEMPT_SECONDS = 15.0
GONE = 410
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[list[str]]]
_UNICAST6 = ipaddress.IPv6Network("2000::/3")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt. `is_final`: another attempt cannot succeed."""

    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class WebhookRules:
    """Secrets, and allowed hosts: `names` (empty: any name; `*.example.com`: its subdomains) and non-public `networks`.

    A request may go to an address that is public or in one of `networks`, and without TLS only to the latter.
    """

    secrets: tuple[bytes, ...] = field(repr=False)
    names: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()

    def check(self, text: str) -> httpx.URL:
        """Return the URL. Raise ValueError with the rule that it breaks."""
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            raise ValueError("it is not a valid URL") from None
        if url.scheme not in ("https", "http") or not url.host or url.userinfo or url.fragment:
            raise ValueError("it must be an https URL with a host, without user name, password and fragment")
        if url.scheme == "http" and not self.networks:
            raise ValueError("it must be an https URL")
        if (address := _address_of(url.host)) is not None:
            self.check_address(url, url.host)
        if self.names and not (self._has_name(url.host) or (address is not None and self._lists(address))):
            raise ValueError(f"the operator of the server does not allow the host {url.host}")
        return url

    def check_address(self, url: httpx.URL, text: str) -> None:
        """Raise ValueError unless a request for `url` may go to the address `text`."""
        address = _address_of(text)
        if address is None:
            raise ValueError(f"{text} is not an address")
        is_listed = self._lists(address)
        if not (is_listed or is_public(address)):
            raise ValueError(f"{url.host} is at the address {address}, which is not public")
        if not is_listed and url.scheme == "http":
            raise ValueError("it must be an https URL")

    def _lists(self, address: Address) -> bool:
        return any(address.version == network.version and address in network for network in self.networks)

    def _has_name(self, host: str) -> bool:
        return host in self.names or host.endswith(tuple(name[1:] for name in self.names if name.startswith("*.")))


def read_rules(environment: Mapping[str, str]) -> WebhookRules | None:
    """Return the rules from the environment; None without a secret. Raise ConfigError for an invalid value."""
    secrets = tuple(_secret(word) for word in _words(environment, SECRETS))
    names, networks = [], []
    for word in _words(environment, HOSTS):
        try:
            networks.append(ipaddress.ip_network(word))
        except ValueError:
            if "/" in word or ":" in word:
                raise ConfigError(f"{HOSTS}: {word!r} is neither a host name nor a network like 10.0.0.0/8") from None
            names.append(word.lower())
    return WebhookRules(secrets, tuple(names), tuple(networks)) if secrets else None


def _words(environment: Mapping[str, str], name: str) -> list[str]:
    return [word for text in environment.get(name, "").split(",") if (word := text.strip())]


def _secret(word: str) -> bytes:
    try:
        secret = base64.b64decode(word.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        secret = b""
    if not word.startswith(SECRET_PREFIX) or len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"{SECRETS} must be {SECRET_PREFIX} and base64; make one: echo whsec_$(openssl rand -base64 32)"
        )
    return secret


def _address_of(text: str) -> Address | None:
    """Return an address, IPv4 for one that is mapped to IPv6; None for a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def is_public(address: Address) -> bool:
    """Return whether an address is on the public internet, and not one that a tunnel translates to another."""
    if isinstance(address, ipaddress.IPv6Address):
        is_tunnel = address.sixtofour is not None or address.teredo is not None
        return address in _UNICAST6 and address.is_global and not is_tunnel
    return address.is_global and not address.is_multicast


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def sign(secrets: tuple[bytes, ...], event_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: one signature for each secret."""
    signed = b"%b.%d.%b" % (event_id.encode(), timestamp, body)
    digests = (base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets)
    return " ".join(f"v1,{digest}" for digest in digests)


class WebhookSender:
    """Send the events `batch.completed`, `batch.failed`, `batch.expired` and `batch.cancelled` of OpenAI's API."""

    def __init__(
        self,
        rules: WebhookRules,
        resolve: Resolve = resolve_host,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rules = rules
        self._resolve = resolve
        self._clock = clock
        self._client = httpx.AsyncClient(
            transport=transport,
            verify=httpx.create_ssl_context(),
            trust_env=False,  # a proxy would resolve the host again
            follow_redirects=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # a connection belongs to one host name
            timeout=ATTEMPT_SECONDS,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, notice: Notice) -> Failure | None:
        """Send one event; return None if the receiver accepted it with a 2xx status."""
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                return await self._send(notice)
        except TimeoutError:
            return Failure(f"no response within {ATTEMPT_SECONDS:g} s")
        except (httpx.HTTPError, OSError) as error:
            return Failure(f"{type(error).__name__}: {error}")
        except ValueError as error:
            return Failure(str(error), is_final=True)

    async def _send(self, notice: Notice) -> Failure | None:
        url = self._rules.check(notice.url)
        addresses = await self._resolve(url.host, url.port or (443 if url.scheme == "https" else 80))
        for address in addresses:
            self._rules.check_address(url, address)
        address = addresses[notice.attempts % len(addresses)]
        body = orjson.dumps(event_of(notice))
        headers = {"host": url.netloc.decode(), **self._headers(notice, body)}
        names = {"sni_hostname": url.raw_host.decode()}  # the certificate is the host's, not the address's
        target = url.copy_with(host=address)
        async with self._client.stream("POST", target, content=body, headers=headers, extensions=names) as response:
            if response.is_success:
                return None
            return Failure(f"status {response.status_code}", is_final=response.status_code == GONE)

    def _headers(self, notice: Notice, body: bytes) -> dict[str, str]:
        event_id, now = event_of(notice)["id"], int(self._clock())
        return {
            "content-type": "application/json",
            "user-agent": f"tidemill/{__version__}",
            "webhook-id": str(event_id),
            "webhook-timestamp": str(now),
            "webhook-signature": sign(self._rules.secrets, str(event_id), now, body),
        }


def event_of(notice: Notice) -> dict[str, object]:
    """Return OpenAI's event object. The id is the same in every attempt, so that receivers can drop repetitions."""
    return {
        "id": notice.batch.replace("batch_", "evt_", 1),
        "object": "event",
        "created_at": notice.ended_at,
        "type": f"batch.{notice.status}",
        "data": {"id": notice.batch},
    }
