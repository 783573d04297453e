"""Learns what words cost on a server, from the `usage` of a few one-token answers; no tokenizer needed.

Text with a word n times costs overhead + n · cost tokens. One probe with every word tells whether all cost one token;
only groups that do not are split further. Works for any server that reports `usage.prompt_tokens`.
"""

from collections.abc import Awaitable, Callable, Sequence

from loadgen.errors import ServerError
from loadgen.prompts import ANCHOR, WORDS, WordCosts

REPEATS = 8
Probe = Callable[[str], Awaitable[int]]
"""Sends a text and returns `usage.prompt_tokens`."""


async def word_costs(probe: Probe, words: Sequence[str] = WORDS) -> WordCosts:
    """The cost of each word; raises ServerError when the counts cannot be explained by a cost per word."""
    first = words[0]
    overhead, long = await probe(_text([])), await probe(_text([first] * REPEATS))
    cost, rest = divmod(long - overhead, REPEATS)
    if rest or cost < 1:
        raise ServerError(
            f"prompt tokens do not grow evenly with words ({overhead}, then {long}): use --prompt-mode ids"
        )
    costs = {first: cost}
    await _measure(probe, [word for word in words if word != first], overhead, costs)
    return WordCosts(tuple(costs), tuple(costs.values()), overhead)


async def _measure(probe: Probe, words: list[str], overhead: int, costs: dict[str, int]) -> None:
    """Splits groups until each is one word or wholly of cost 1 (no word costs less)."""
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
