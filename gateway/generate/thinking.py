"""Thinking budgets: the maximum number of reasoning tokens of a chat request."""

from engine.errors import InvalidRequestError
from engine.text.thoughts import ThinkingBudget, ThoughtMarks
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_parser import Parsing
from gateway.generate.channels import ANALYSIS, END
from gateway.generate.tool_formats import END_THINK, THINK
from gateway.generate.wire import ChatCompletionRequest

PARAM = "thinking_token_budget"
UNLIMITED = 2**31 - 1


def find_marks(tokenizer: Tokenizer) -> ThoughtMarks | None:
    """Return the tokens that delimit reasoning, or None if the model has no reasoning."""
    if not (tokenizer.has_channels or END_THINK in tokenizer.chat_template_text):
        return None
    marks = (ANALYSIS, END) if tokenizer.has_channels else (THINK, END_THINK)
    return ThoughtMarks(*(tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in marks))


def check_budget(body: ChatCompletionRequest, marks: ThoughtMarks | None) -> None:
    """Raise InvalidRequestError for a budget if the model has no reasoning."""
    if body.thinking_token_budget is not None and marks is None:
        message = "This model's chat template does not support reasoning; remove 'thinking_token_budget'."
        raise InvalidRequestError(message, param=PARAM, code="unsupported_parameter")


def budget_of(body: ChatCompletionRequest, parsing: Parsing | None, has_grammar: bool) -> ThinkingBudget | None:
    """Return the budget of the request, or None without a budget or reasoning. If the prompt opens reasoning, an answer
    with a grammar gets an unlimited budget, so that the grammar applies after the reasoning. A grammar of channels
    includes the reasoning and its budget."""
    if parsing is None or parsing.marks is None or (has_grammar and parsing.has_channels):
        return None
    tokens = body.thinking_token_budget
    if tokens is None and has_grammar and parsing.is_thinking:
        tokens = UNLIMITED
    return None if tokens is None else ThinkingBudget(tokens, parsing.marks, parsing.is_thinking)


def check_thought_before(budget: ThinkingBudget, param: str) -> None:
    """Raise InvalidRequestError if the model cannot reason before an answer with a grammar (`param`)."""
    if not budget.begun and len(budget.marks.opening) > 1:
        message = f"'{PARAM}' cannot be used with '{param}': this model opens reasoning with several tokens."
        raise InvalidRequestError(message, param=PARAM, code="unsupported_parameter")
