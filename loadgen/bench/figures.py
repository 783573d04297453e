"""The four figures of the serving benchmark and the work behind them."""

from dataclasses import dataclass

PROMPT, OUTPUT, PREFILL = 128, 64, 512
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second: one stream's decode, a 512-token prefill, and 8 and 16 streams of 128 in / 64 out."""

    one_stream: float
    prefill: float
    eight: float
    sixteen: float


def ratio(left: Figures, right: Figures) -> Figures:
    return Figures(
        left.one_stream / right.one_stream,
        left.prefill / right.prefill,
        left.eight / right.eight,
        left.sixteen / right.sixteen,
    )
