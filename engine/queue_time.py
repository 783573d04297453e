"""How long an online request may be expected to wait for its start before it is refused (`--max-queue-time`)."""

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
    """At most `seconds`, and at most `objectives` times the TTFT objective. A user would rather wait for two seconds
    than be refused, so the default is far beyond the objective."""

    seconds: float = math.inf
    objectives: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "QueueTime":
        """`10x`: times the TTFT objective; `5s`, `500ms`, `2m`: a time; `none`: no limit. Raises ConfigError."""
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
        """Seconds; `ttft`: the objective, infinite where none is stated."""
        return min(self.seconds, self.objectives * ttft)
