"""What the representations of a request's past cost: measured once, beside the latency model (Apt-Serve §4, its ρ)."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class CacheCosts:
    """Seconds, above zero; None where the engine did not offer the representation when it was measured.

    run_hidden    of one step, for every past token of it that is run from hidden state, or 8 bits, instead of KV (ρ)
    restore       once, for every token whose K and V are projected from its hidden state, or go to 8 bits, or come back
    swap_out      once, for every unit that goes from the device to the host
    swap_in       once, for every unit that comes back
    """

    run_hidden: float | None = None
    restore: float | None = None
    swap_out: float | None = None
    swap_in: float | None = None

    def __post_init__(self) -> None:
        for seconds in (self.run_hidden, self.restore, self.swap_out, self.swap_in):
            if seconds is not None and not 0.0 < seconds < float("inf"):
                raise ValueError("cache costs must be finite and above zero")

    def over(self, older: "CacheCosts") -> "CacheCosts":
        """These costs, and those of `older` where nothing was measured."""
        return CacheCosts(
            *(mine if mine is not None else theirs for mine, theirs in zip(astuple(self), astuple(older), strict=True))
        )

    def covers(self, *, hidden: bool, host: bool, converts: bool = False) -> bool:
        """Whether everything that is offered was measured."""
        missing = (hidden and self.run_hidden is None) or ((hidden or converts) and self.restore is None)
        return not (missing or (host and (self.swap_out is None or self.swap_in is None)))


NOT_MEASURED = CacheCosts()
