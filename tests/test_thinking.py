"""Thinking budgets: how thoughts are counted, where they are brought to an end, and what clients see of it."""

import functools
from pathlib import Path
from typing import Any

import pytest
from fakes.speculation import Oracle
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz
from support.http import post, prompt_of
from support.lazy import openai
from test_structured import EOS, ask, make_driver, tokenizer
from test_tools import TEMPLATE, TOOLS, client_of, scripted
from test_tools import ask as ask_http

from engine.api import EngineRequest, FinishReason, RequestClass, RequestTimes, Resumption
from engine.forms import Grammar, ThinkingBudget, ThoughtMarks
from engine.process import frames
from engine.text.thoughts import ThoughtTracker
from gateway.generate.answer_form import UNLIMITED

MARKS = ThoughtMarks((9,), (7, 8, 7))
THINKS = TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}{% if false %}</think>{% endif %}"
MAY_THINK = TEMPLATE + "{% if false %}</think>{% endif %}"


# Counts


def count_slowly(marks: ThoughtMarks, begun: bool, ids: list[int]) -> tuple[int, bool]:
    """Tokens of thoughts and whether one is open, by searching the remaining tokens for marks."""
    total, thinking = 0, begun
    inside: list[int] = []
    for token_id in ids:
        inside.append(token_id)
        mark = list(marks.closing if thinking else marks.opening)
        if inside[-len(mark) :] == mark and len(inside) >= len(mark):
            total += len(inside) - len(mark) if thinking else 0
            thinking, inside = not thinking, []
    if thinking:
        mark = list(marks.closing)
        part = next(size for size in range(len(mark) - 1, -1, -1) if size == 0 or inside[-size:] == mark[:size])
        total += len(inside) - part
    return total, thinking


@fuzz(300)
@given(
    ids=st.lists(st.sampled_from([1, 7, 8, 9]), max_size=30),
    begun=st.booleans(),
    marks=st.sampled_from([MARKS, ThoughtMarks((9,), (8,)), ThoughtMarks((9, 9, 1), (7, 7, 8))]),
    cuts=st.sets(st.integers(0, 30), max_size=5),
)
def test_thoughts_are_counted_alike_however_they_come(
    ids: list[int], begun: bool, marks: ThoughtMarks, cuts: set[int]
) -> None:
    tracker = ThoughtTracker(marks, begun)
    ends = [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    for first, last in zip([0, *ends], ends, strict=False):
        tracker.advance(ids[first:last])
    assert (tracker.num_thoughts, tracker.thinking) == count_slowly(marks, begun, ids)
    due = tracker.closing_due(tracker.num_thoughts)
    assert bool(due) == tracker.thinking
    tracker.advance(due)
    assert not tracker.thinking and tracker.num_thoughts == count_slowly(marks, begun, ids)[0]


def test_what_follows_the_only_thought_is_said() -> None:
    tracker = ThoughtTracker(MARKS, once=True)
    assert tracker.may_begin and tracker.advance([9, 1, 7, 8, 7, 9, 1]) == [9, 1]
    plain = ThoughtTracker(MARKS, once=True)
    assert plain.advance([1, 9, 2]) == [1, 9, 2] and not plain.thinking and not plain.may_begin


# Drawn tokens


@functools.cache
def marks() -> ThoughtMarks:
    """Of the demo model, in whose vocabulary they are several tokens."""
    return ThoughtMarks(*(tuple(tokenizer().encode(text, add_special_tokens=False)) for text in ("[[", "]] Now")))


def find(ids: list[int], mark: tuple[int, ...]) -> int:
    return next((at for at in range(len(ids)) if tuple(ids[at : at + len(mark)]) == mark), -1)


def drafts_of(known: Any, backend: str) -> Oracle:
    return Oracle(lambda spec: known.outputs[spec.request_id], seed=1, penalties=backend != "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native", "cuda"])
def test_a_spent_budget_closes_the_thought_and_nothing_else_changes(backend: str) -> None:
    """Among others, in a pool that is too small, with penalties, bias against the mark, a least length, and with its
    first token as a stop: up to the mark an answer is the same as without a budget."""
    free, held, drafted = make_driver(backend), make_driver(backend, num_blocks=60), make_driver(backend, num_blocks=60)
    drafted.core.state.speculation = drafts_of(held, backend)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"frequency_penalty": 1.5, "logit_bias": tuple((token, -100.0) for token in marks().closing)},
        {"min_tokens": 25, "logprobs": 2},
        {"top_p": 0.9, "min_p": 0.01},
    ]
    budgets = (0, 1, 7, 20, 200)
    for number in range(10):
        fields = {"seed": number, "stop_token_ids": frozenset(), **options[number % 5]}
        fields["request_class"] = [RequestClass.ONLINE, RequestClass.OFFLINE][number % 2]
        budget = ThinkingBudget(budgets[number // 2], marks(), begun=True)
        free.add(ask(f"r{number}", None, 50, **fields))
        for driver in (held, drafted):
            driver.add(ask(f"r{number}", None, 50, **fields, thinking=budget))
    for driver in (free, held, drafted):
        driver.run()
    assert drafted.outputs == held.outputs and drafted.stats().accepted_tokens > 30
    for number in range(10):
        ids, budget_tokens = held.outputs[f"r{number}"], budgets[number // 2]
        assert len(ids) == 50 and held.finals[f"r{number}"].error is None
        if budget_tokens < 50:
            assert find(ids, marks().closing) == budget_tokens
        assert ids[:budget_tokens] == free.outputs[f"r{number}"][:budget_tokens]
    assert sum(held.stats().preemptions.values()) > 0
    assert (held.stats().forced_tokens > 0) is (len(marks().closing) > 1)


def test_the_next_engine_goes_on_with_the_same_budget() -> None:
    """After its death in the middle of a thought, of the mark, and behind it; the request crosses as a frame."""
    whole = make_driver("torch")
    budget = ThinkingBudget(9, marks(), begun=True)
    whole.add(ask("r", None, 30, seed=3, thinking=budget, stop_token_ids=frozenset()))
    whole.run()
    for known in (1, 8, 9, 10, 12, 20):
        request = ask("r", None, 30, seed=3, thinking=budget, stop_token_ids=frozenset())
        times = RequestTimes(0.0, 0.0, 0.0, 0.0)
        given_already = tuple(whole.outputs["r"][:known])
        sent = EngineRequest("r", request.prompt_token_ids, request.sampling, resumed=Resumption(given_already, times))
        (message,) = frames.engine_reader().feed(frames.encode(frames.Resume((sent,))))
        assert isinstance(message, frames.Resume)
        driver = make_driver("torch")
        driver.add(*message.requests)
        driver.run()
        assert [*given_already, *driver.outputs["r"]] == whole.outputs["r"]


@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_a_grammar_holds_behind_the_thought(backend: str) -> None:
    """Where the prompt has begun to think, and where the model may; it may not end before it has said anything."""
    driver, drafted = make_driver(backend, num_blocks=60), make_driver(backend, num_blocks=60)
    drafted.core.state.speculation = drafts_of(driver, backend)
    opening = tokenizer().encode("[", add_special_tokens=False)[:1]
    one = ThoughtMarks((opening[0],), marks().closing)
    grammar = Grammar("regex", "[0-9]{3}")
    wants = ((opening[0], 100.0),)
    for number in range(4):
        for each in (driver, drafted):
            begun = ThinkingBudget(5, one, True)
            each.add(ask(f"begun {number}", grammar, 60, seed=number, thinking=begun, logit_bias=((EOS, 100.0),)))
            each.add(ask(f"may {number}", grammar, 60, seed=number, thinking=ThinkingBudget(5, one)))
            each.add(ask(f"will {number}", grammar, 60, seed=number, thinking=ThinkingBudget(5, one), logit_bias=wants))
            each.add(ask(f"none {number}", grammar, 60, seed=number, thinking=ThinkingBudget(0, one), logit_bias=wants))
    driver.run()
    drafted.run()
    assert drafted.outputs == driver.outputs and drafted.stats().accepted_tokens > 0
    for name, ids in driver.outputs.items():
        assert driver.finals[name].finish_reason is FinishReason.STOP
        closed = find(ids, one.closing)
        said = ids[closed + len(one.closing) :] if closed >= 0 else ids
        text = tokenizer().decode(said)
        assert text.isdigit() and len(text) == 3, (name, tokenizer().decode(ids))
        assert closed == {"begun": 5, "will": 6, "none": -1}.get(name.split()[0], closed)
        assert closed < 0 or name.startswith("begun") or ids[0] == opening[0]


# Answers to clients


async def test_usage_counts_thoughts_and_the_budget_reaches_the_engine(tmp_path: Path) -> None:
    text = "<think>so it is the dog</think>\n\nYes"
    async with scripted(tmp_path, text, MAY_THINK) as served, client_of(served) as client:
        fields = ask_http(tools=[], extra_body={"thinking_token_budget": 64})
        answer = await client.chat.completions.create(**fields, n=2)
        expected = len(served.app.state.context.tokenizer.encode("so it is the dog", add_special_tokens=False))
        details = answer.usage and answer.usage.completion_tokens_details
        assert details is not None and details.reasoning_tokens == 2 * expected
        options = {"include_usage": True}
        stream = await client.chat.completions.create(**fields, stream=True, stream_options=options)
        usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
        assert [usage.completion_tokens_details.reasoning_tokens for usage in usages] == [expected]
        budget = served.engine.requests[0].sampling.thinking
        assert budget is not None and budget.tokens == 64 and not budget.begun
        assert [len(mark) for mark in (budget.marks.opening, budget.marks.closing)] == [1, 1]
        stopped = await client.chat.completions.create(**ask_http(tools=[], stop=["dog"]))
        assert stopped.usage and stopped.usage.completion_tokens_details
        assert stopped.usage.completion_tokens_details.reasoning_tokens == expected
        assert served.engine.requests[-1].sampling.thinking is None


async def test_a_budget_is_that_of_the_request_alone(tmp_path: Path) -> None:
    async with scripted(tmp_path, "Yes", THINKS) as served:
        for fields in ({}, {"thinking_token_budget": 5}):
            for tier in ("flex", "default"):
                answer = await post(served, **ask_http(tools=[], service_tier=tier, **fields))
                assert answer.status_code == 200, answer.text
        budgets = [request.sampling.thinking for request in served.engine.requests]
        assert [each and each.tokens for each in budgets] == [None, None, 5, 5]
        assert all(each.begun for each in budgets if each is not None)


async def test_what_cannot_be_held_to_a_budget_says_so(tmp_path: Path) -> None:
    budget = {"thinking_token_budget": 5}
    async with scripted(tmp_path / "plain", "Yes") as served, client_of(served) as client:
        with pytest.raises(openai.BadRequestError, match="does not support reasoning") as caught:
            await client.chat.completions.create(**ask_http(tools=[], extra_body=budget))
        assert caught.value.param == "thinking_token_budget"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ask_http(tools=[], extra_body={"thinking_token_budget": -1}))
        assert caught.value.param == "thinking_token_budget" and not served.engine.requests


@pytest.mark.parametrize("budget", [None, 5])
async def test_forms_and_calls_follow_an_open_thought(tmp_path: Path, budget: int | None) -> None:
    """With a budget or without one, the thought is free text and the grammar applies behind it."""
    call = '<tool_call>\n{"name": "time.now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    named = {"type": "function", "function": {"name": "time.now"}}
    extra: dict[str, Any] = {} if budget is None else {"extra_body": {"thinking_token_budget": budget}}
    async with scripted(tmp_path, f"hm</think>{call}", THINKS) as served, client_of(served) as client:
        for fields in ({"tool_choice": "required"}, {"tool_choice": named}, {"tools": strict}):
            answer = await client.chat.completions.create(**ask_http(**fields, **extra))
            message = answer.choices[0].message
            assert [each.function.name for each in message.tool_calls or []] == ["time.now"]
            assert (message.model_extra or {})["reasoning"] == "hm"
        form: dict[str, Any] = {"tools": [], "response_format": {"type": "json_object"}}
        answer = await client.chat.completions.create(**ask_http(**form, **extra))
        assert answer.choices[0].message.content == call
    for request in served.engine.requests:
        sampling = request.sampling
        assert sampling.grammar is not None and sampling.thinking is not None and sampling.thinking.begun
        assert sampling.thinking.tokens == (UNLIMITED if budget is None else budget)


async def test_forms_of_models_that_may_think_begin_at_once(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    async with scripted(tmp_path, "{}", template) as served, client_of(served) as client:
        form: dict[str, Any] = {"tools": [], "response_format": {"type": "json_object"}}
        answer = await client.chat.completions.create(**ask_http(**form))
    assert answer.choices[0].message.content == "{}" and served.engine.requests[0].sampling.thinking is None


EFFORTS = [
    ("minimal", "low"),
    ("low", "low"),
    ("medium", "medium"),
    ("high", "high"),
    ("xhigh", "high"),
    ("max", "max"),
]


async def test_efforts_reach_templates_that_know_them(tmp_path: Path) -> None:
    """An effort that the template does not name is replaced by the next one; a template without efforts gets none."""
    template = TEMPLATE + "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}{% endif %}"
    template += "{% if reasoning_effort == 'max' %}{% endif %}"
    async with scripted(tmp_path, "Yes", template) as served, client_of(served) as client:
        for effort, told in EFFORTS:
            await client.chat.completions.create(**ask_http(tools=[], reasoning_effort=effort))
            prompt = prompt_of(served)
            assert prompt.endswith(f"effort {told}")
    async with scripted(tmp_path / "plain", "Yes") as served, client_of(served) as client:
        for given in (None, *(effort for effort, _ in EFFORTS)):
            await client.chat.completions.create(**ask_http(tools=[], reasoning_effort=given))
        assert len({request.prompt_token_ids for request in served.engine.requests}) == 1
