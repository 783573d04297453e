"""Costs of the cache representations, measured once with the latency model (Apt-Serve §4, its ρ).

Work on hidden state has a part that does not depend on the number of tokens: reading the weights of K and V and
launching operators in every layer. It is therefore measured at two sizes, on live engines and simulated devices, and
both parts are taken from the line through the two points.
"""

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

FEW_TOKENS, MANY_TOKENS = 128, 1024
"""Token counts, run or restored from hidden state, of the two measured steps."""

MEMORY_RATE = 1e13
"""Bytes per second, an upper bound of device memory bandwidth."""


class Affine(NamedTuple):
    """Cost in seconds: `fixed` once per step with such tokens, plus `token` per token."""

    fixed: float
    token: float

    def per_token(self, tokens: int) -> float:
        """Return the cost per token in a step with that many tokens."""
        return self.token + self.fixed / tokens


def affine(few: tuple[int, float], many: tuple[int, float], floor: float = 0.0) -> Affine:
    """Fit a nonnegative line with slope of at least `floor` to two measurements (tokens, seconds).

    With equal token counts, the whole cost is attributed to the tokens.
    """
    (fewer, at_few), (more, at_many) = few, many
    if more <= fewer:
        return Affine(0.0, max(at_many / more, floor))
    token = max((at_many - at_few) / (more - fewer), floor)
    fixed = (at_few + at_many - token * (fewer + more)) / 2  # exact for both points unless the floor raised the slope
    if fixed < 0.0:
        return Affine(0.0, max((fewer * at_few + more * at_many) / (fewer * fewer + more * more), floor))
    return Affine(fixed, token)


@dataclass(frozen=True, slots=True)
class CacheCosts:
    """Costs in seconds; None if the engine did not offer the representation during the measurement.

    Attributes:
        run_hidden: Per step and past token that is read from hidden state instead of KV; positive.
        restore: Once per token whose K and V are projected from hidden state; positive.
        swap_out: Once per unit copied from the device to the host; positive.
        swap_in: Once per unit copied back; positive.
        run_hidden_step: Per step with any token of `run_hidden`, in addition to it.
        restore_step: Per step with any token of `restore`, in addition to it.
    """

    run_hidden: float | None = None
    restore: float | None = None
    swap_out: float | None = None
    swap_in: float | None = None
    run_hidden_step: float | None = None
    restore_step: float | None = None

    def __post_init__(self) -> None:
        for seconds in (self.run_hidden, self.restore, self.swap_out, self.swap_in):
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise ValueError("cache costs must be finite and above zero")
        for seconds in (self.run_hidden_step, self.restore_step):
            if seconds is not None and not 0.0 <= seconds < float("inf"):
                raise ValueError("cache costs of a step must be finite and not below zero")

    def rho(self, tokens: int) -> float:
        """Return the added time per token (ρ) of a step that reads `tokens` from hidden state; 0 if none."""
        if self.run_hidden is None or tokens <= 0:
            return 0.0
        return Affine(self.run_hidden_step or 0.0, self.run_hidden).per_token(tokens)

    def coefficients(self) -> dict[str, Any]:
        """Return the cache coefficients of a latency model by name; 0 for unmeasured costs."""
        return {
            "compact": self.run_hidden or 0.0,
            "compact_step": self.run_hidden_step or 0.0,
            "restored": self.restore or 0.0,
            "restored_step": self.restore_step or 0.0,
        }

    def over(self, older: "CacheCosts") -> "CacheCosts":
        """Return these costs, with unmeasured ones taken from `older`."""
        return CacheCosts(
            *(mine if mine is not None else theirs for mine, theirs in zip(astuple(self), astuple(older), strict=True))
        )

    def covers(self, *, hidden: bool, host: bool) -> bool:
        """Return whether all offered representations were measured."""
        missing = hidden and (self.run_hidden is None or self.restore is None)
        return not (missing or (host and (self.swap_out is None or self.swap_in is None)))


NOT_MEASURED = CacheCosts()
