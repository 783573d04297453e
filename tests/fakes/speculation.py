"""Drafts from the model's future tokens, with mistakes: verification without luck."""

from collections.abc import Callable, Sequence
from random import Random

from engine.api import EngineRequest
from engine.request import Request
from engine.scheduling.plan import StepPlan
from engine.scheduling.speculation import Speculation

WRONG, AWAITS = 0.3, 0.5


class Oracle(Speculation):
    """Draft up to `most` tokens behind each decode, each wrong with probability WRONG, at any cost.

    `answer` returns the output tokens of a request that runs alone.
    """

    def __init__(
        self, answer: Callable[[EngineRequest], Sequence[int]], seed: int, most: int = 5, *, penalties: bool = False
    ) -> None:
        super().__init__(penalties=penalties)
        self._answer, self._most, self._random = answer, most, Random(seed)
        self.judged: list[int] = []

    def add(self, step: StepPlan, decodes: Sequence[Request], limit: float) -> None:
        for request in decodes:
            known, room = len(request.token_ids), request.max_total_tokens - len(request.token_ids) - 1
            if step.state.config.state_slots or request.cache_map.num_compact or request.num_computed_tokens != known:
                continue
            if not self._is_eligible(request):
                continue
            right = self._answer(request.spec)
            count = min(self._random.randint(0, self._most), room, step.ledger.tokens_left, step.ledger.sequences_left)
            guesses = right[known - request.num_prompt_tokens :][:count]
            if guesses:
                step.add_guesses(request, [self._maybe(token) for token in guesses])

    def is_promising(self, decodes: Sequence[Request]) -> bool:
        return self._random.random() < AWAITS

    def judge(self, request: Request, accepted: int) -> None:
        self.judged.append(accepted)

    def _maybe(self, token: int) -> int:
        return max(0, token - 1) if self._random.random() < WRONG else token
