"""The share of every step that batch lines at risk of missing their completion window get beside online work.

`--reserve 10%`: while such lines are there, prompts leave them a tenth of the tokens and of the time of a step, and who
starts online leaves them a tenth of the rows and of the memory. The share is of the whole step: beside online work of
`s` seconds they may add `s · share / (1 - share)`. It is a part of what the operator chose, so neither the circuit
breaker nor the offline budget takes it away, and all that predicts waiting times counts it in.
"""

from engine.errors import ConfigError

NO_RESERVE = "0%"
MAX_RESERVE = 0.5


def parse_reserve(text: str) -> float:
    """`10%` or `0.1`: 0 to one half. Raises ConfigError."""
    word = text.strip()
    try:
        share = float(word.removesuffix("%")) / (100.0 if word.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= MAX_RESERVE:
        raise ConfigError(f"--reserve must be a share between 0% and {MAX_RESERVE:.0%}, such as 10%, not '{text}'")
    return share
