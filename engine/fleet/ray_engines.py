"""Engines as actors of a Ray cluster, on any of its nodes, for a server that runs on one of them.

An actor starts the engine's process beside itself and passes frames on: what the process says comes through one
streaming generator, as it is read (a step's outputs are one frame), what it is told through calls in order. Both ends
are those of a child process of this machine, with a socketpair whose other end is the cluster instead of the child; so
supervision, restarts and resumption know nothing of Ray. Ray's own restarts are off: `RestartPolicy` says when.

Imports ray (the extra `ray`) only when a cluster is asked for.
"""

import contextlib
import importlib
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.flight import recorder as flight
from engine.machine.child import python_module
from engine.machine.facts import Place, read_processor
from engine.process import frames
from engine.process.supervisor import Child, ProcessEndpoint

log = logging.getLogger("tidemill.fleet")

READ = 1 << 20
"""Bytes of an item, at most."""
RESERVE_SECONDS = 60.0
"""How long the cluster may take to find room for all engines."""
END_SECONDS = 10.0

Ended = tuple[str, list[flight.AnyEntry]]
"""How a process ended, and what its flight recorder held."""


class EngineActor:
    """One engine's process on the node of the actor, which it ends with. `cpus`: of the node, that are the actor's."""

    def __init__(self, command: Sequence[str] | None, cpus: int) -> None:
        self._command = command or python_module("engine.process.child")
        self._place = Place(engines=max(1, read_processor().cores // cpus))
        self._child: Child | None = None

    def run(self, launch: bytes) -> Iterator[bytes | Ended]:
        """Start the process and give all that it says; at last how it ended."""
        told = msgspec.msgpack.decode(launch, type=frames.Launch)
        child = self._child = Child.spawn(self._command, msgspec.structs.replace(told, place=self._place))
        with contextlib.suppress(ConnectionError):
            while data := child.sock.recv(READ):
                yield data
        child.kill()
        yield child.reap(), child.entries

    def tell(self, data: bytes) -> None:
        """Frames for the process. Nothing is said to one that is gone: `run` says so."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                self._child.sock.sendall(data)

    def dump(self) -> None:
        """See Endpoint.dump."""
        if self._child is not None:
            self._child.dump()


class RemoteEngine(ProcessEndpoint):
    """An engine's process behind an actor, as a child of this machine would be: our end of a socketpair."""

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
        """From a thread: it asks the cluster."""
        threading.Thread(target=self._kill_actor, name="tidemill-ray-kill", daemon=True).start()

    def _kill_actor(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    def reap(self, timeout: float | None = None) -> str:
        self._pull.join(END_SECONDS if timeout is None else timeout)
        if self._pull.is_alive() and timeout is not None:
            raise TimeoutError
        self.kill()  # its room is for the next one
        self.sock.close()
        self._push.join(END_SECONDS)
        self._theirs.close()
        return self._ended[0]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Room for engines in a Ray cluster: a bundle of `bundle` resources for each, in the placement group `group`."""

    ray: Any
    group: Any
    bundle: dict[str, float]
    command: Sequence[str] | None = None

    @classmethod
    def connect(
        cls, address: str, engines: int, config: EngineConfig, command: Sequence[str] | None = None, **options: Any
    ) -> "Cluster":
        """Join the cluster at `address` (`HOST:PORT`; `auto`: the one that runs on this machine; `local`: one that is
        started here and ends with us) and reserve room for all engines. Raises ConfigError."""
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
        """For people: where an engine runs."""
        return " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())

    @property
    def cpus(self) -> int:
        """Of one engine."""
        return int(self.bundle["CPU"])

    def spawn(self, number: int, launch: frames.Launch) -> RemoteEngine:
        """The process of the engine of that number, in its bundle."""
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
    """What an engine needs: a GPU where there is one for each, or its part of the processors. Raises ConfigError."""
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
        raise ConfigError("--ray needs the extra 'ray': pip install 'tidemill[ray]'") from None
    return ray
