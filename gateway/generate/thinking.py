"""The thinking budget of a chat request: the most tokens that its answers may think."""

from engine.errors import InvalidRequestError
from engine.text.thoughts import ThinkingBudget, ThoughtMarks
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_parser import Parsing
from gateway.generate.tool_formats import END_THINK, THINK
from gateway.generate.wire import ChatCompletionRequest

PARAM = "thinking_token_budget"


def find_marks(tokenizer: Tokenizer) -> ThoughtMarks | None:
    """The tokens between which the model thinks; None: its chat template knows of no thoughts."""
    if END_THINK not in tokenizer.chat_template_text:
        return None
    return ThoughtMarks(*(tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (THINK, END_THINK)))


def check_budget(body: ChatCompletionRequest, marks: ThoughtMarks | None) -> None:
    """Whether the model can be held to a budget. Raises InvalidRequestError."""
    if body.thinking_token_budget is not None and marks is None:
        message = "This model's chat template knows of no thoughts: a budget for them has no effect."
        raise InvalidRequestError(message, param=PARAM, code="unsupported_parameter")


def budget_of(body: ChatCompletionRequest, parsing: Parsing | None) -> ThinkingBudget | None:
    """Return the budget that the request sets, or None if it sets none or the model has no marks of thoughts."""
    if body.thinking_token_budget is None or parsing is None or parsing.marks is None:
        return None
    return ThinkingBudget(body.thinking_token_budget, parsing.marks, parsing.is_thinking)


def check_thought_before(budget: ThinkingBudget, param: str) -> None:
    """Whether an answer can be told to think before what a grammar holds for. Raises InvalidRequestError."""
    if not budget.begun and len(budget.marks.opening) > 1:
        message = f"'{PARAM}' cannot be used with '{param}': this model's mark of a thought is several tokens."
        raise InvalidRequestError(message, param=PARAM, code="unsupported_parameter")
