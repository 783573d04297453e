"""Measurement of token counts per word on a server that reports `usage.prompt_tokens`; needs no tokenizer.

A text with a word n times has overhead + n · cost tokens. One probe with all words shows whether each costs one token;
otherwise groups are bisected.
"""

from collections.abc import Awaitable, Callable, Sequence

from loadgen.errors import ServerError
from loadgen.prompts import ANCHOR, WORDS, WordCosts

REPEATS = 8
Probe = Callable[[str], Awaitable[int]]
"""Send a text and return `usage.prompt_tokens`."""


async def word_costs(probe: Probe, words: Sequence[str] = WORDS) -> WordCosts:
    """Return the cost of each word. Raise ServerError if a constant cost per word does not explain the counts."""
    first = words[0]
    overhead, long = await probe(_text([])), await probe(_text([first] * REPEATS))
    cost, rest = divmod(long - overhead, REPEATS)
    if rest or cost < 1:
        raise ServerError(
            f"prompt tokens do not grow linearly with words ({overhead}, then {long}); use --prompt-mode ids"
        )
    costs = {first: cost}
    await _measure(probe, [word for word in words if word != first], overhead, costs)
    return WordCosts(tuple(costs), tuple(costs.values()), overhead)


async def _measure(probe: Probe, words: list[str], overhead: int, costs: dict[str, int]) -> None:
    """Bisect groups until each is a single word or has words of cost 1 only, the minimum. Fill `costs`."""
    groups = [words] if words else []
    while groups:
        group = groups.pop()
        total = await probe(_text(group)) - overhead
        if total == len(group) or len(group) == 1:
            costs.update(dict.fromkeys(group, 1) if total == len(group) else {group[0]: max(1, total)})
        else:
            half = len(group) // 2
            groups += [group[half:], group[:half]]


def _text(words: Sequence[str]) -> str:
    return ANCHOR + "".join(f" {word}" for word in words)
