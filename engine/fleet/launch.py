"""Make the engines of a fleet: the place of each engine and its share of the machine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.fleet.client import FleetClient
from engine.fleet.ray_engines import Cluster
from engine.flight.file import Flights
from engine.machine.facts import read_processor, share_out
from engine.process.client import EngineProcess, patience
from engine.process.launcher import ProcessOptions


@dataclass(frozen=True, slots=True)
class Fleet:
    """The client of a fleet and notes for the user."""

    client: FleetClient
    notes: tuple[str, ...]


def make_fleet(
    config: EngineConfig, engines: int, pid_file: Path, *, log_level: str, flights: Flights | None = None, ray: str = ""
) -> Fleet:
    """Make the engines without starting them. Raise ConfigError if there is no place for them.

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
        ranks = config.tensor_parallel_size
        places = share_out(engines, config.device, ranks=ranks)
        placed = bool(places[0].processors or places[0].device)
        threads = None if placed else max(1, read_processor().cores // (engines * ranks))
        files = [pid_file.with_stem(f"{pid_file.stem}-{number}") for number in range(engines)]
        options = [{"place": place, "pid_file": file} for place, file in zip(places, files, strict=True)]
        notes = [f"engine {number} runs on {place.shown}" for number, place in enumerate(places)]
    own = config if config.threads is not None else replace(config, threads=threads)

    def make(number: int, changed: Callable[[], None]) -> EngineProcess:
        common = ProcessOptions(log_level=log_level, flights=flights, changed=changed, waits=False)
        return EngineProcess(own, replace(common, **options[number]))

    client = FleetClient(make, engines, drop=config.overload == "drop", patience=patience(config))
    return Fleet(client, tuple(notes))
