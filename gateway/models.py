"""Model names of the API: the served model with its aliases, and LoRA adapters as MODEL:NAME or NAME.

Every name can have a service tier as a suffix, as in `MODEL:flex`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.errors import ConfigError
from gateway.http.keys import TIERS, Tier


class Model(NamedTuple):
    """A model or adapter. `adapter`: number of the adapter, 0 for none; `root` and `parent`: as in /v1/models."""

    adapter: int
    root: str
    parent: str | None = None
    tier: Tier | None = None


MAX_NAMED = 5
"""Maximum number of models that an error message names."""


class ModelNames:
    """`served`: names of the model, the main one first; `adapters`: names in the order of the adapter numbers.

    Raises ConfigError if the name of an adapter is already used."""

    def __init__(self, served: Sequence[str], adapters: Sequence[str] = ()) -> None:
        self.first = served[0]
        self._models = {name: Model(0, self.first) for name in served}
        self._listed = dict(self._models)
        for number, adapter in enumerate(adapters, 1):
            if adapter in TIERS or adapter in self._models:
                message = "the name belongs to a model, another adapter or a service tier; use another name"
                raise ConfigError(f"adapter {adapter}: {message}")
            whole = {f"{name}:{adapter}": Model(number, adapter, name) for name in served}
            self._listed |= whole
            self._models |= whole | {adapter: Model(number, adapter, self.first)}

    def listed(self) -> Iterator[tuple[str, Model]]:
        """Yield the names for /v1/models, with the model's own names first."""
        yield from self._listed.items()

    def summary(self) -> str:
        """Return the first names for an error message, and how many others there are."""
        names = list(self._listed)
        others = f" and {len(names) - MAX_NAMED} others; see GET /v1/models" if len(names) > MAX_NAMED else ""
        return ", ".join(names[:MAX_NAMED]) + others

    def find(self, name: str) -> Model | None:
        """Return the model of a name, or None if it does not exist."""
        if (model := self._models.get(name)) is not None:
            return model
        base, _, suffix = name.rpartition(":")
        tier = next((each for each in TIERS if each == suffix), None)
        model = self._models.get(base)
        return None if model is None or tier is None else model._replace(tier=tier)
