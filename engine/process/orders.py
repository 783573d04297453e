"""What an engine process is told on its way into a pipeline of two engines and out of it (KunServe §4), step by step.

An order comes when the one before it is done, whoever it was for; only `Reset` may come at any time. Layers are a range
as (first, end). See docs/develop/process.md.
"""

from typing import NamedTuple

import msgspec

from engine.api import EngineRequest

Layers = tuple[int, int]
WHOLE, LEADER, FOLLOWER = "whole", "leader", "follower"
"""What an engine is: by itself, who schedules a pipeline's steps and computes its first layers, or the other one."""


class Past(NamedTuple):
    """K and V of a request's first `num_tokens` tokens lie in `units`, in the order of its block table."""

    request_id: str
    num_tokens: int
    units: tuple[int, ...]


class Part(NamedTuple):
    """Some layers of a past. `units`: where they lie, on the engine that has them."""

    request_id: str
    units: tuple[int, ...]
    layers: Layers


class OrderBase(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all orders."""


class Hold(OrderBase, frozen=True):
    """No step runs when this is answered, nor any until `Go`. `closes`: nor is a request taken, as the engine's core
    will have nothing to say."""

    closes: bool


class Meet(OrderBase, frozen=True):
    """Link up with the other engine at this path of a socket: `listens`, or connects to who does."""

    path: str
    listens: bool


class Stall(OrderBase, frozen=True):
    """Let all requests stand still where they are; answered by the pasts of those that have one, in the first
    `num_units` units. The others start over."""

    num_units: int


class Detach(OrderBase, frozen=True):
    """Let go of all requests; answered by the pasts of those that have one. Nothing of them is overwritten before
    `Reform`."""


class Exchange(OrderBase, frozen=True):
    """Read what stays here in other units (`keeps`) and what goes to the other engine (`gives`), and take in what that
    gives; `first`: send before receiving."""

    keeps: tuple[Part, ...]
    gives: tuple[Part, ...]
    gets: tuple[Part, ...]
    first: bool


class Reform(OrderBase, frozen=True):
    """Keep these layers and no others (None: have all of them), with `num_units` units of memory, of which those keep
    their numbers that stand still; `schedules`: whether they are the core's to give out."""

    layers: Layers | None
    num_units: int
    schedules: bool


class Attach(OrderBase, frozen=True):
    """Go on with these requests, in this order, each with the number of tokens whose past will come (unless it stands
    still here); answered by where that goes."""

    requests: tuple[tuple[EngineRequest, int], ...]


class Place(OrderBase, frozen=True):
    """Write what was exchanged of these pasts into their units; all else is forgotten."""

    pasts: tuple[Past, ...]


class Go(OrderBase, frozen=True):
    """Steps run again, with these requests, whose past is there, among the others."""

    role: str
    arrived: tuple[str, ...] = ()


class Retire(OrderBase, frozen=True):
    """To a leader that runs: give out the first `num_units` alone, and answer once nothing lies behind them, or after a
    while with the pasts that do."""

    num_units: int


class Prepare(OrderBase, frozen=True):
    """Nothing lies behind the first `num_units` any more: load the layers that are absent into the memory there, while
    steps run."""

    num_units: int


class Dissolve(OrderBase, frozen=True):
    """To a leader at rest: the other engine ends to follow; both go on with what comes next."""


class Reset(OrderBase, frozen=True):
    """Be a whole engine again, whatever has happened, and compute the requests again: those of `known` that are here,
    no others, and `requests` where they are not here."""

    num_units: int
    known: tuple[str, ...]
    requests: tuple[EngineRequest, ...]


Order = Hold | Meet | Stall | Detach | Exchange | Reform | Attach | Place | Go | Retire | Prepare | Dissolve | Reset
