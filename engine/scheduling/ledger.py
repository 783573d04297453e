"""One step's ledger: what is left of each limit. Every chunk, decode included, is charged to all of them."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepLedger:
    """Tokens and sequences left in the step being built (units are kept by the pool)."""

    tokens_left: int
    sequences_left: int

    def charge(self, tokens: int) -> None:
        """Charge one chunk; the caller has checked that it fits."""
        self.tokens_left -= tokens
        self.sequences_left -= 1
        assert self.tokens_left >= 0 and self.sequences_left >= 0, "ledger overdrawn"
