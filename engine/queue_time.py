"""`--max-queue-time`: the expected wait above which an online request is refused."""

import math
import re
from dataclasses import dataclass

from engine.errors import ConfigError

DEFAULT_QUEUE = "10x"
UNLIMITED_QUEUE = "none"
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|x)")


@dataclass(frozen=True, slots=True)
class QueueTime:
    """Maximum wait; both limits apply. The default exceeds the objective because users prefer a late answer to none."""

    seconds: float = math.inf
    objectives: float = math.inf  # multiple of the TTFT objective

    @classmethod
    def parse(cls, text: str) -> "QueueTime":
        """Parse `10x` (times the TTFT objective), a time like `500ms`, `5s` or `2m`, or `none`.

        Raise ConfigError for any other text.
        """
        if text.strip() == UNLIMITED_QUEUE:
            return cls()
        found = _FORM.fullmatch(text.strip())
        number = float(found.group(1)) if found else 0.0
        if found is None or not 0.0 < number < math.inf:
            raise ConfigError(f"--max-queue-time must be a time like 5s, a multiple like 10x, or none, not '{text}'")
        if found.group(2) == "x":
            return cls(objectives=number)
        return cls(seconds=number * _UNITS[found.group(2)])

    def longest(self, ttft: float) -> float:
        """Return the maximum wait, seconds. `ttft` is the TTFT objective, infinite if there is none."""
        return min(self.seconds, self.objectives * ttft)
