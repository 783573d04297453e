"""The models that requests may name: the served one under its names, and each LoRA adapter as MODEL:NAME, or as NAME
alone; any of them with a service tier behind it, as in `MODEL:flex`. Knows nothing of requests."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.errors import ConfigError
from gateway.http.keys import TIERS, Tier


class Model(NamedTuple):
    """What a name stands for. `adapter`: its number, 0: none; `parent`, `root`: for the list of models."""

    adapter: int
    root: str
    parent: str | None = None
    tier: Tier | None = None


class ModelNames:
    """`served`: names of the model, the first one its own; `adapters`: in the order of their numbers.

    Raises ConfigError for an adapter whose name is taken."""

    def __init__(self, served: Sequence[str], adapters: Sequence[str] = ()) -> None:
        self.first = served[0]
        self._models = {name: Model(0, self.first) for name in served}
        self._listed = dict(self._models)
        for number, adapter in enumerate(adapters, 1):
            if adapter in TIERS or adapter in self._models:
                raise ConfigError(f"adapter {adapter}: the name is that of a model, another adapter or a service tier")
            whole = {f"{name}:{adapter}": Model(number, adapter, name) for name in served}
            self._listed |= whole
            self._models |= whole | {adapter: Model(number, adapter, self.first)}

    def listed(self) -> Iterator[tuple[str, Model]]:
        """The names to tell, with the model's own in front."""
        yield from self._listed.items()

    def find(self, name: str) -> Model | None:
        """None: there is no such model."""
        if (model := self._models.get(name)) is not None:
            return model
        base, _, suffix = name.rpartition(":")
        tier = next((each for each in TIERS if each == suffix), None)
        model = self._models.get(base)
        return None if model is None or tier is None else model._replace(tier=tier)
