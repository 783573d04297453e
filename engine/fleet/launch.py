"""Make the engines of a fleet: on this machine, each with its share, or as actors on the nodes of a Ray cluster.

An actor starts the engine process on its node and forwards frames. Messages of the process come through one streaming
generator, and messages to the process through ordered calls. A socketpair connects them to the same code that serves a
local child process, so supervision, restarts and resumption do not depend on Ray. Ray's own restarts are off;
`RestartPolicy` decides.

ray (the extra `ray`) is imported only for `--ray`.
"""

import contextlib
import importlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine import flight
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.fleet.client import FleetClient
from engine.flight import Flights
from engine.machine.child import python_module, say
from engine.machine.extras import install_command
from engine.machine.facts import Resources, read_processor, share_out
from engine.process import frames
from engine.process.client import EngineProcess, patience
from engine.process.launcher import Child, ProcessEndpoint, ProcessOptions

log = logging.getLogger("tidemill.fleet")

READ = 1 << 20
"""Maximum bytes of a forwarded item."""
RESERVE_SECONDS = 60.0
"""Timeout in seconds for the reservation of the engines' resources."""
END_SECONDS = 10.0

Ended = tuple[str, list[flight.AnyEntry]]
"""The exit status of a process as text, and the entries of its flight recorder."""


class EngineActor:
    """The engine process on the actor's node. It ends with the actor. `cpus`: CPUs reserved for the actor."""

    def __init__(self, command: Sequence[str] | None, cpus: int) -> None:
        self._command = command or python_module("engine.process.child")
        self._place = Resources(engines=max(1, read_processor().cores // cpus))
        self._child: Child | None = None

    def run(self, launch: bytes) -> Iterator[bytes | Ended]:
        """Start the process and yield the bytes that it sends, and finally its end."""
        told = msgspec.msgpack.decode(launch, type=frames.Launch)
        child = self._child = Child.spawn(self._command, msgspec.structs.replace(told, place=self._place))
        with contextlib.suppress(ConnectionError):
            while data := child.sock.recv(READ):
                yield data
        child.kill()
        yield child.reap(), child.entries

    def tell(self, data: bytes) -> None:
        """Send frames to the process. Ignore them if it has ended; `run` reports that."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                self._child.sock.sendall(data)

    def dump(self) -> None:
        """See ProcessEndpoint.dump."""
        if self._child is not None:
            self._child.dump()


class RemoteEngine(ProcessEndpoint):
    """The endpoint of an engine process behind an actor, with a socketpair as for a local child."""

    def __init__(self, ray: Any, actor: Any, launch: frames.Launch) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours)
        self._ray, self._actor = ray, actor
        self._ended: Ended = ("the loss of its actor", [])
        items = actor.run.options(num_returns="streaming").remote(msgspec.msgpack.encode(launch))
        self._pull = threading.Thread(target=self._pull_items, args=(items,), name="tidemill-ray-out", daemon=True)
        self._push = threading.Thread(target=self._push_frames, name="tidemill-ray-in", daemon=True)
        self._pull.start()
        self._push.start()

    def _pull_items(self, items: Any) -> None:
        try:
            for item in map(self._ray.get, items):
                if isinstance(item, bytes):
                    self._theirs.sendall(item)
                else:
                    self._ended = item
        except (self._ray.exceptions.RayError, OSError) as error:
            log.info("an actor's engine says nothing more: %s", type(error).__name__)
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)

    def _push_frames(self) -> None:
        tell = self._actor.tell.options(concurrency_group="told")
        with contextlib.suppress(OSError, self._ray.exceptions.RayError):
            while data := self._theirs.recv(READ):
                tell.remote(data)

    @property
    def entries(self) -> list[flight.AnyEntry]:
        return self._ended[1]

    def dump(self) -> None:
        self._actor.dump.options(concurrency_group="told").remote()

    def kill(self) -> None:
        """Kill the actor from a thread, because the call to the cluster blocks."""
        threading.Thread(target=self._kill_actor, name="tidemill-ray-kill", daemon=True).start()

    def _kill_actor(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    def reap(self, timeout: float | None = None) -> str:
        self._pull.join(END_SECONDS if timeout is None else timeout)
        if self._pull.is_alive() and timeout is not None:
            raise TimeoutError
        self.kill()  # frees the resources for the next actor
        self.sock.close()
        self._push.join(END_SECONDS)
        self._theirs.close()
        return self._ended[0]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The resources reserved in a Ray cluster: one `bundle` per engine, in the placement group `group`."""

    ray: Any
    group: Any
    bundle: dict[str, float]
    command: Sequence[str] | None = None

    @classmethod
    def connect(
        cls, address: str, engines: int, config: EngineConfig, command: Sequence[str] | None = None, **options: Any
    ) -> "Cluster":
        """Connect to a cluster and reserve resources for all engines. Raise ConfigError.

        `address`: `HOST:PORT`, `auto` (the cluster on this machine) or `local` (a new one that ends with this process).
        """
        ray = _import_ray()
        try:
            ray.init(address=address, configure_logging=False, log_to_driver=True, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--ray {address}: {error}") from None
        bundle = bundle_for(ray.cluster_resources(), engines, config)
        group = ray.util.placement_group([bundle] * engines, strategy="SPREAD")
        if not group.wait(RESERVE_SECONDS):
            raise ConfigError(
                f"--ray {address}: no room for {engines} engines of {bundle} in {ray.cluster_resources()}"
            )
        return cls(ray, group, bundle, command)

    @property
    def shown(self) -> str:
        """The resources of an engine, for messages to the user."""
        return " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())

    @property
    def cpus(self) -> int:
        """CPUs of one engine."""
        return int(self.bundle["CPU"])

    def spawn(self, number: int, launch: frames.Launch) -> RemoteEngine:
        """Start the process of an engine in the bundle with its number."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=number
        )
        make = self.ray.remote(concurrency_groups={"told": 1})(EngineActor)
        actor = make.options(
            num_cpus=self.bundle["CPU"],
            num_gpus=self.bundle.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy=strategy,
        ).remote(self.command, self.cpus)
        return RemoteEngine(self.ray, actor, launch)


def bundle_for(resources: dict[str, float], engines: int, config: EngineConfig) -> dict[str, float]:
    """Return the resources of one engine: a GPU if there is one for each, else its share of the CPUs.

    Raise ConfigError if the cluster has too few.
    """
    gpus = int(resources.get("GPU", 0.0))
    if config.device == "cuda" and gpus < engines:
        raise ConfigError(f"--engines {engines} needs as many GPUs; the cluster has {gpus}")
    if gpus >= engines and config.device != "cpu":
        return {"CPU": 1.0, "GPU": 1.0}
    cpus = config.threads or int(resources.get("CPU", 0.0)) // engines
    if cpus < 1:
        raise ConfigError(f"--engines {engines} needs a processor for each; the cluster has {resources.get('CPU', 0)}")
    return {"CPU": float(cpus)}


def _import_ray() -> Any:
    try:
        ray: Any = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise ConfigError(f"--ray needs ray; run {install_command('ray')}") from None
    return ray


def make_fleet(
    config: EngineConfig, engines: int, pid_file: Path, *, log_level: str, flights: Flights | None = None, ray: str = ""
) -> FleetClient:
    """Make the engines without starting them, and print their places. Raise ConfigError if there is no place for them.

    Args:
        pid_file: Process ids go into files beside it, one per engine.
        flights: Stores the flight recordings of dead processes.
        ray: Address of a Ray cluster that runs the engines; empty: this machine.
    """
    options: list[dict[str, Any]]
    threads: int | None
    if ray:
        cluster = Cluster.connect(ray, engines, config)
        threads = cluster.cpus
        options = [{"spawn": partial(cluster.spawn, number)} for number in range(engines)]
        notes = [f"{engines} engines run in the cluster, each on {cluster.shown}"]
    else:
        places = share_out(engines, config.device)
        placed = bool(places[0].processors or places[0].device)
        threads = None if placed else max(1, read_processor().cores // engines)
        files = [pid_file.with_stem(f"{pid_file.stem}-{number}") for number in range(engines)]
        options = [{"place": place, "pid_file": file} for place, file in zip(places, files, strict=True)]
        notes = [f"engine {number} runs on {place.shown}" for number, place in enumerate(places)]
    own = config if config.threads is not None else replace(config, threads=threads)

    def make(number: int, changed: Callable[[], None]) -> EngineProcess:
        common = ProcessOptions(log_level=log_level, flights=flights, changed=changed, waits=False)
        return EngineProcess(own, replace(common, **options[number]))

    for note in notes:
        say(note)
    return FleetClient(make, engines, drop=config.overload == "drop", patience=patience(config))
