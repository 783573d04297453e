"""The orders by which two engine processes form a pipeline and dissolve it (KunServe §4).

An order is sent when the previous one is done on either engine; only `Reset` may come at any time. Layers are a range
(first, end). A request's "past" is its K and V. See docs/develop/process.md.
"""

from typing import NamedTuple

import msgspec

from engine.api import EngineRequest

Layers = tuple[int, int]
WHOLE, LEADER, FOLLOWER = "whole", "leader", "follower"
"""The roles of an engine. The leader schedules the steps of a pipeline and computes its first layers."""


class Past(NamedTuple):
    """The K and V of a request's first `num_tokens` tokens, in `units` in the order of its block table."""

    request_id: str
    num_tokens: int
    units: tuple[int, ...]


class Part(NamedTuple):
    """Some layers of a past. `units`: their units on the engine that holds them."""

    request_id: str
    units: tuple[int, ...]
    layers: Layers


class OrderBase(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all orders."""


class Hold(OrderBase, frozen=True):
    """Run no step from the answer until `Go`."""

    closes: bool  # also refuse new requests, because the engine becomes the follower


class Meet(OrderBase, frozen=True):
    """Connect to the other engine through the socket at `path`."""

    path: str
    listens: bool  # whether this engine listens; the other engine connects


class Stall(OrderBase, frozen=True):
    """Stop all requests with their pasts in place. The answer holds the pasts in the first `num_units` units.

    Requests without such a past start over.
    """

    num_units: int


class Detach(OrderBase, frozen=True):
    """Remove all requests. The answer holds their pasts, which stay intact until `Reform`."""


class Exchange(OrderBase, frozen=True):
    """Exchange parts of pasts with the other engine."""

    keeps: tuple[Part, ...]  # parts that move to other units of this engine
    gives: tuple[Part, ...]  # parts to send to the other engine
    gets: tuple[Part, ...]  # parts to receive
    first: bool  # whether this engine sends before it receives


class Reform(OrderBase, frozen=True):
    """Resize the engine to some layers and units. Stopped requests keep their units."""

    layers: Layers | None  # layers to keep; None: load all layers
    num_units: int
    schedules: bool  # whether the core of this engine allocates the units


class Attach(OrderBase, frozen=True):
    """Add requests in this order. The answer holds the units for their pasts."""

    requests: tuple[tuple[EngineRequest, int], ...]  # with the tokens of the past to come; ignored for stopped requests


class WritePasts(OrderBase, frozen=True):
    """Write the exchanged parts of these pasts into their units, and discard the other parts."""

    pasts: tuple[Past, ...]


class Go(OrderBase, frozen=True):
    """Run steps again."""

    role: str
    arrived: tuple[str, ...] = ()  # ids of requests whose past is complete


class Retire(OrderBase, frozen=True):
    """Make a running leader allocate only the first `num_units` units.

    The answer comes once the other units are free, or after a timeout with the pasts that still use them.
    """

    num_units: int


class Prepare(OrderBase, frozen=True):
    """Load the absent layers into the memory behind the first `num_units` units, which is free, while steps run."""

    num_units: int


class Dissolve(OrderBase, frozen=True):
    """Make a held leader end the pipeline, and make the follower wait for that."""


class Reset(OrderBase, frozen=True):
    """Become a whole engine again from any state, and compute the open requests again."""

    num_units: int
    known: tuple[str, ...]  # ids of the gateway's open requests; others are dropped
    requests: tuple[EngineRequest, ...]  # requests to resume if they are not here


Order = (
    Hold | Meet | Stall | Detach | Exchange | Reform | Attach | WritePasts | Go | Retire | Prepare | Dissolve | Reset
)  # fmt: skip
