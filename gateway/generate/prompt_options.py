"""Options of a chat request: variables of the chat template, the end of the prompt, effort and budget of reasoning."""

from typing import Any

from engine.errors import InvalidRequestError
from engine.forms import ThinkingBudget, ThoughtMarks
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_parser import Parsing
from gateway.generate.channels import ANALYSIS, END
from gateway.generate.reasoning import SWITCHES
from gateway.generate.tool_formats import END_THINK, THINK
from gateway.generate.wire import ChatCompletionRequest

BUDGET = "thinking_token_budget"
UNLIMITED = 2**31 - 1
_NEXT_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_RESERVED = frozenset(
    {
        "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    }
)  # fmt: skip
"""Arguments of transformers' rendering that are no variables of the template."""


def check_prompt_end(body: ChatCompletionRequest) -> None:
    """Raise InvalidRequestError if the request asks to continue a message that cannot be continued."""
    if not body.continue_final_message:
        return
    last = body.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        message = "'continue_final_message' needs a last message with the role 'assistant', text and no calls."
        raise InvalidRequestError(message, param="continue_final_message")
    if body.add_generation_prompt:
        message = "'add_generation_prompt' cannot be used with 'continue_final_message'."
        raise InvalidRequestError(message, param="add_generation_prompt")


def template_options(body: ChatCompletionRequest, template: str) -> dict[str, Any]:
    """Return the arguments for the rendering of the chat template. An effort that the template does not read is
    ignored, because agents always send one. Raises InvalidRequestError for a reserved name."""
    options = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED & options.keys()):
        param = f"chat_template_kwargs.{reserved[0]}"
        raise InvalidRequestError(f"'{param}' is no variable of a chat template.", param=param)
    effort, switches = body.reasoning_effort, _switches(template)
    if effort == "none" and switches:
        options[switches[0]] = False
    elif effort is not None and "reasoning_effort" in template:
        is_known = f"'{effort}'" in template or f'"{effort}"' in template
        options["reasoning_effort"] = effort if is_known else _NEXT_EFFORTS.get(effort, effort)
    options["add_generation_prompt"] = body.add_generation_prompt is not False and not body.continue_final_message
    return options | ({"continue_final_message": True} if body.continue_final_message else {})


def apply_effort(body: ChatCompletionRequest, template: str, reasons: bool) -> None:
    """Apply the budget in a field of other servers if the model reasons. Replace the effort `none` by a budget of 0 if
    its template has no switch."""
    if reasons and body.thinking_token_budget is None:
        body.thinking_token_budget = body.other_budget()
    if body.reasoning_effort == "none" and reasons and not _switches(template):
        body.thinking_token_budget = 0


def _switches(template: str) -> list[str]:
    return [name for name in SWITCHES if name in template] if END_THINK in template else []


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
        raise InvalidRequestError(message, param=BUDGET, code="unsupported_parameter")


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
        message = f"'{BUDGET}' cannot be used with '{param}': this model opens reasoning with several tokens."
        raise InvalidRequestError(message, param=BUDGET, code="unsupported_parameter")
