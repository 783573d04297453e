"""Fields of a chat request that control reasoning: this server's, and those of DashScope, Dify, GLM, DeepSeek, Kimi,
OpenRouter and Ollama."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gateway.generate.validation import ClientObject, StrictBody, at_most

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SWITCHES = ("enable_thinking", "thinking")
"""Names under which chat templates read whether the model reasons first."""
MAX_TEMPLATE_OPTIONS = 64
TemplateOptions = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_OPTIONS), at_most(MAX_TEMPLATE_OPTIONS)]
_INT32 = 2**31 - 1


class ThinkingSwitch(ClientObject):
    """`budget_tokens`: maximum number of reasoning tokens."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, ge=0, le=_INT32)


class ReasoningSwitch(StrictBody):
    """`max_tokens`: maximum number of reasoning tokens. Reasoning is always returned, in a field of its own."""

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: int | None = Field(None, ge=0, le=_INT32)
    exclude: Literal[False] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ReasoningFields(StrictBody):
    """The first three fields take precedence over those of other servers. `chat_template_kwargs`: variables for the
    chat template."""

    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=_INT32)
    chat_template_kwargs: TemplateOptions | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    think: bool | Effort | None = None
    reasoning: ReasoningSwitch | None = None
    thinking_budget: int | None = Field(None, ge=0, le=_INT32)

    @model_validator(mode="after")
    def _apply_switches(self) -> Self:
        switch = self._switch()
        self.reasoning_effort = self.reasoning_effort or self._effort() or ("none" if switch is False else None)
        if switch:
            self.chat_template_kwargs = dict.fromkeys(SWITCHES, True) | (self.chat_template_kwargs or {})
        return self

    def _switch(self) -> bool | None:
        """Return whether the client turns reasoning on or off; None: the model decides."""
        thinking, reasoning = self.thinking, self.reasoning
        if isinstance(thinking, ThinkingSwitch):
            thinking = {"enabled": True, "disabled": False}.get(thinking.type)
        asked = (self.enable_thinking, thinking, self.think, reasoning and reasoning.enabled)
        return next((each for each in asked if isinstance(each, bool)), None)

    def _effort(self) -> Effort | None:
        if isinstance(self.think, str):
            return self.think
        return self.reasoning.effort if self.reasoning else None

    def other_budget(self) -> int | None:
        """Return the maximum number of reasoning tokens in a field of other servers, which models without reasoning
        ignore."""
        budgets = (
            self.thinking.budget_tokens if isinstance(self.thinking, ThinkingSwitch) else None,
            self.reasoning.max_tokens if self.reasoning else None,
            self.thinking_budget,
        )
        return next((each for each in budgets if each is not None), None)
