"""What the representations of a request's past cost: measured once, beside the latency model (Apt-Serve §4, its ρ).

Work on hidden state has a part that does not grow with the tokens: the first of a step has the weights of K and V read
for it, and operators launched in every layer. So it is measured at two sizes, by live engines and by simulated devices,
and a line goes through both: one size alone says as much of the other part as of this one.
"""

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

FEW_TOKENS, MANY_TOKENS = 128, 1024
"""Tokens run from hidden state, or restored, in the steps that are measured."""

MEMORY_RATE = 1e13
"""Bytes/s that no device memory reaches."""


class Affine(NamedTuple):
    """Seconds: `fixed` of a step with any token of the kind, and `token` for each of them."""

    fixed: float
    token: float

    def per_token(self, tokens: int) -> float:
        """A token's share where a step has so many."""
        return self.token + self.fixed / tokens


def affine(few: tuple[int, float], many: tuple[int, float], floor: float = 0.0) -> Affine:
    """The line nearest to two measurements (tokens, seconds) whose slope is `floor` or more, and which is nowhere below
    zero. Equal numbers of tokens are one measurement: then all of it goes by the token."""
    (fewer, at_few), (more, at_many) = few, many
    if more <= fewer:
        return Affine(0.0, max(at_many / more, floor))
    token = max((at_many - at_few) / (more - fewer), floor)
    fixed = (at_few + at_many - token * (fewer + more)) / 2  # both points lie on it unless the slope was too small
    if fixed < 0.0:
        return Affine(0.0, max((fewer * at_few + more * at_many) / (fewer * fewer + more * more), floor))
    return Affine(fixed, token)


@dataclass(frozen=True, slots=True)
class CacheCosts:
    """Seconds, above zero; None where the engine did not offer the representation when it was measured.

    run_hidden       of one step, for every past token of it that is run from hidden state instead of KV
    restore          once, for every token whose K and V are projected from its hidden state
    swap_out         once, for every unit that goes from the device to the host
    swap_in          once, for every unit that comes back
    run_hidden_step  of every step with any such token, beside `run_hidden`; may be zero
    restore_step     the same beside `restore`
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
        """Return the seconds that a token adds to a step that runs `tokens` from hidden state (ρ), or 0 if none can."""
        if self.run_hidden is None or tokens <= 0:
            return 0.0
        return Affine(self.run_hidden_step or 0.0, self.run_hidden).per_token(tokens)

    def coefficients(self) -> dict[str, Any]:
        """Those of a latency model for work on hidden state, by name; zero for what was not measured."""
        return {
            "compact": self.run_hidden or 0.0,
            "compact_step": self.run_hidden_step or 0.0,
            "restored": self.restore or 0.0,
            "restored_step": self.restore_step or 0.0,
        }

    def over(self, older: "CacheCosts") -> "CacheCosts":
        """These costs, and those of `older` where nothing was measured."""
        return CacheCosts(
            *(mine if mine is not None else theirs for mine, theirs in zip(astuple(self), astuple(older), strict=True))
        )

    def covers(self, *, hidden: bool, host: bool) -> bool:
        """Return whether everything that is offered was measured."""
        missing = hidden and (self.run_hidden is None or self.restore is None)
        return not (missing or (host and (self.swap_out is None or self.swap_in is None)))


NOT_MEASURED = CacheCosts()
