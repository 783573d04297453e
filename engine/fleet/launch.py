"""The engines of one machine: where each of them runs, and what it may take there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engine.config import EngineConfig
from engine.fleet.client import FleetClient, MakeEngine
from engine.fleet.ray_engines import Cluster
from engine.machine.facts import Place, read_processor, share_out
from engine.process.client import EngineProcess, patience
from engine.process.flights import Flights
from engine.process.judge import RestartPolicy


@dataclass(frozen=True, slots=True)
class Fleet:
    """A client and what the user should know of it."""

    client: FleetClient
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What a fleet is made of. The numbers of the processes go into files beside `pid_file`; `policy` makes one
    engine's own; `flights` keeps what any of them did at last. `ray`: the address of a cluster on whose nodes they run,
    instead of on this machine."""

    engines: int
    pid_file: Path
    log_level: str
    policy: Callable[[], RestartPolicy]
    flights: Flights | None = None
    ray: str = ""

    def make(self, config: EngineConfig) -> Fleet:
        """Engines that are not started yet. Raises ConfigError where they have no place."""
        if self.ray:
            return self._make_on(Cluster.connect(self.ray, self.engines, config), config)
        places = share_out(self.engines, config.device, ranks=config.tensor_parallel_size)
        own = _with_threads(config, self.engines) if not (places[0].processors or places[0].device) else config

        def make(number: int, changed: Callable[[], None]) -> EngineProcess:
            return EngineProcess(
                own,
                log_level=self.log_level,
                pid_file=self.pid_file.with_stem(f"{self.pid_file.stem}-{number}"),
                policy=self.policy(),
                flights=self.flights,
                place=places[number],
                changed=changed,
                waits=False,
            )

        return Fleet(self._client(make, config), tuple(_notes(places)))

    def _make_on(self, cluster: Cluster, config: EngineConfig) -> Fleet:
        own = config if config.threads is not None else replace(config, threads=cluster.cpus)

        def make(number: int, changed: Callable[[], None]) -> EngineProcess:
            return EngineProcess(
                own,
                log_level=self.log_level,
                policy=self.policy(),
                flights=self.flights,
                spawn=partial(cluster.spawn, number),
                changed=changed,
                waits=False,
            )

        return Fleet(
            self._client(make, config), (f"{self.engines} engines run in the cluster, each on {cluster.shown}",)
        )

    def _client(self, make: MakeEngine, config: EngineConfig) -> FleetClient:
        drop = config.overload == "drop"
        return FleetClient(make, self.engines, drop=drop, patience=patience(config), seed=config.seed)


def _notes(places: Sequence[Place]) -> Iterator[str]:
    for number, place in enumerate(places):
        yield f"engine {number} runs on {place.shown}"


def _with_threads(config: EngineConfig, engines: int) -> EngineConfig:
    """They share their processors, so each has its part of the threads, and each rank of one."""
    if config.threads is not None:
        return config
    return replace(config, threads=max(1, read_processor().cores // (engines * config.tensor_parallel_size)))
