"""Plan the engines of a fleet: the place of each engine and its share of the machine."""

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
    """The client of a fleet and notes for the user."""

    client: FleetClient
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The settings of a fleet."""

    engines: int  # number of engines
    pid_file: Path  # process ids go into files beside it, one per engine
    log_level: str
    policy: Callable[[], RestartPolicy]  # makes the restart policy of one engine
    flights: Flights | None = None  # stores the flight recordings of dead processes
    ray: str = ""  # address of a Ray cluster that runs the engines; empty: this machine

    def make(self, config: EngineConfig) -> Fleet:
        """Make the engines without starting them. Raise ConfigError if there is no place for them."""
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
        return FleetClient(make, self.engines, drop=drop, patience=patience(config))


def _notes(places: Sequence[Place]) -> Iterator[str]:
    for number, place in enumerate(places):
        yield f"engine {number} runs on {place.shown}"


def _with_threads(config: EngineConfig, engines: int) -> EngineConfig:
    """Return the configuration with this engine's share of the threads, divided among its ranks."""
    if config.threads is not None:
        return config
    return replace(config, threads=max(1, read_processor().cores // (engines * config.tensor_parallel_size)))
