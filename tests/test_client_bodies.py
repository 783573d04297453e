"""Bodies as clients send them: decorated or empty objects in messages and tools must give the prompt of plain ones, and
fields of vLLM and SGLang have the same effect as in those servers."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import MODEL, FakeEngine, Script, Served, say, serve
from fixtures import StartServer
from support.http import post, prompt_of
from support.lazy import openai
from test_responses_api import THINKS
from test_tools import TEMPLATE, TOOLS, TWO, client_of, scripted

from engine.api import Lane, RequestClass
from engine.client import SamplingDefaults
from engine.text.tokenizer import Tokenizer

HI: Any = {"role": "user", "content": "hi"}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
RESULT: Any = {"role": "tool", "tool_call_id": "c1", "content": "fog"}
CALLING: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}


async def prompt(served: Served, messages: list[Any], **fields: Any) -> str:
    answer = await post(served, messages=messages, **fields)
    assert answer.status_code == 200, answer.text
    return prompt_of(served)


DECORATED: dict[str, tuple[list[Any], list[Any]]] = {
    "a dumped message": (
        [HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": None, "audio": None,
              "function_call": None, "tool_calls": None}, HI],
        [HI, {"role": "assistant", "content": "x"}, HI],
    ),
    "notes of other servers": (
        [{**HI, "id": 7, "opts": {"visible": False}},
         {"role": "assistant", "content": "x", "annotations": [], "reasoning_details": [{"text": "y"}]}, HI],
        [HI, {"role": "assistant", "content": "x"}, HI],
    ),
    "a cache mark in a part": (
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
        [HI],
    ),
    "notes in a call": (
        [HI, {**CALLING, "tool_calls": [{**CALL, "index": 0, "type": None, "extra_content": {"google": {}},
              "function": {**CALL["function"], "parsed_arguments": {}, "provider_specific_fields": None}}]},
         {**RESULT, "status": "done"}],
        [HI, CALLING, RESULT],
    ),
    "an empty list of calls": (
        [HI, {"role": "assistant", "content": "x", "tool_calls": []}, HI],
        [HI, {"role": "assistant", "content": "x"}, HI],
    ),
    "an answer of nothing": (
        [HI, {"role": "assistant", "content": None}, HI],
        [HI, {"role": "assistant", "content": ""}, HI],
    ),
    "empty parts": (
        [{"role": "system", "content": []}, HI, {**CALLING, "content": []}, {**RESULT, "content": []}],
        [{"role": "system", "content": ""}, HI, {**CALLING, "content": ""}, {**RESULT, "content": ""}],
    ),
    "a refusal": (
        [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, HI],
        [HI, {"role": "assistant", "content": "No."}, HI],
    ),
    "a result of nothing": ([HI, CALLING, {**RESULT, "content": None}], [HI, CALLING, {**RESULT, "content": ""}]),
}  # fmt: skip

STRICT = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call></tool_call>{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{{ message.tool_calls[0] | tojson }}{% else %}{{ message.content | trim }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)
"""Decides like Llama 3's by the presence of `tool_calls`, and needs a content elsewhere."""


async def test_decoration_changes_nothing(tmp_path: Path) -> None:
    tools = [{**tool, "cache_control": {}, "function": {**tool["function"], "x": 1}} for tool in TOOLS]
    async with scripted(tmp_path, "ok", STRICT) as served:
        for name, (decorated, plain) in DECORATED.items():
            assert await prompt(served, decorated) == await prompt(served, plain), name
            assert await prompt(served, decorated, tools=tools) == await prompt(served, plain, tools=TOOLS), name


async def test_nulls_mean_nothing_in_all_bodies(tmp_path: Path) -> None:
    """A null is an absent field, known or unknown; an unknown field with a value is refused."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": [HI],
            "stream": True,
            "stream_options": {"include_usage": None, "x": None},
            "response_format": {"type": "text", "json_schema": None, "x": None},
        },
        "/v1/completions": {"prompt": "hi", "suffix": None},
        "/v1/messages": {"messages": [{**HI, "x": None}], "max_tokens": 9, "thinking": None},
        "/v1/responses": {"input": "hi", "text": {"format": {"type": "text", "name": None}, "x": None}},
    }
    async with scripted(tmp_path, "ok") as served:
        for path, body in bodies.items():
            answer = await post(served, path, **body, some_future_field=None)
            assert answer.status_code == 200, answer.text
            answer = await post(served, path, **body, some_future_field=False)
            error = answer.json()["error"]
            assert answer.status_code == 400 and "'some_future_field'" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_with_dumped_messages(tmp_path: Path, stream: bool) -> None:
    """The official client's message as a dict is the same turn as its object."""
    async with scripted(tmp_path, TWO) as served, client_of(served) as client:
        asked: Any = {"model": MODEL, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**asked, messages=[HI]) as chunks:
                message: Any = (await chunks.get_final_completion()).choices[0].message
        else:
            answer: openai.types.chat.ChatCompletion = await client.chat.completions.create(**asked, messages=[HI])
            message = answer.choices[0].message
        results = [{**RESULT, "tool_call_id": call.id} for call in message.tool_calls]
        prompts = []
        for form in (message, message.model_dump(), message.to_dict(), message.model_dump(exclude_none=True)):
            await client.chat.completions.create(**asked, messages=[HI, form, *results])
            prompts.append(prompt_of(served))
    assert len(set(prompts)) == 1 and prompts[0].count("fog") == 2 and "Rome" in prompts[0]


# --- fields

DEFAULTS: dict[str, Any] = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "add_generation_prompt": True, "echo": False,
    "continue_final_message": False, "include_stop_str_in_output": False, "use_beam_search": False, "priority": 0,
    "length_penalty": 1.0, "bad_words": [], "include_reasoning": True, "documents": [], "request_id": "x",
    "mm_processor_kwargs": {}, "return_tokens_as_token_ids": False, "min_p": 0.0, "top_k": 0, "rid": "y",
    "separate_reasoning": True, "stream_reasoning": True, "no_stop_trim": False, "return_hidden_states": False,
    "add_special_tokens": False, "best_of": 1, "early_stopping": False, "vllm_xargs": {}, "chat_template_kwargs": {},
    "repetition_penalty": 1.0, "presence_penalty": 0, "seed": 0, "service_tier": "auto",
}  # fmt: skip


async def test_defaults_of_other_servers_change_nothing(start_server: StartServer) -> None:
    served = await start_server("hello")
    for path, body in (("/v1/chat/completions", {"messages": [HI]}), ("/v1/completions", {"prompt": "hi"})):
        plain = await post(served, path, **body, seed=0, max_tokens=9)
        fields = DEFAULTS if "chat" in path else {k: v for k, v in DEFAULTS.items() if not k.startswith(CHAT_ONLY)}
        full = await post(served, path, **body, **fields, max_tokens=9)
        assert plain.status_code == full.status_code == 200, full.text
        assert plain.json()["choices"] == full.json()["choices"]
        one, other = served.engine.requests[-2:]
        assert (one.prompt_token_ids, one.sampling) == (other.prompt_token_ids, other.sampling)


SWITCHES: list[tuple[dict[str, Any], str | None]] = [
    ({"enable_thinking": False}, "False"), ({"enable_thinking": True}, "True"), ({"think": False}, "False"),
    ({"thinking": {"type": "disabled"}}, "False"), ({"thinking": {"type": "enabled", "budget_tokens": 64}}, "True"),
    ({"thinking": {"type": "auto"}}, ""), ({"thinking": True}, "True"), ({"reasoning": {"enabled": False}}, "False"),
    ({"reasoning": {"effort": "none"}}, "False"), ({"think": "none"}, "False"), ({"reasoning": {"effort": "low"}}, ""),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False"),
    ({"enable_thinking": True, "reasoning_effort": "none"}, "False"),
]  # fmt: skip


async def test_thinking_switches_of_other_servers(tmp_path: Path) -> None:
    """A switch reaches the template; a budget counts only for models with reasoning."""
    async with scripted(tmp_path / "a", "ok", THINKS + "|{{ enable_thinking }}|") as served:
        for fields, value in SWITCHES:
            assert (await prompt(served, [HI], **fields)).endswith(f"|{value}|"), fields
        await prompt(served, [HI], thinking={"type": "enabled", "budget_tokens": 64})
        budget = served.engine.requests[-1].sampling.thinking
        assert budget is not None and budget.tokens == 64
        for path, name in (("/v1/messages", "thinking"), ("/v1/responses", "reasoning")):
            body = {"input": "x"} if name == "reasoning" else {"messages": [HI], "max_tokens": 9}
            error = (await post(served, path, **body, enable_thinking=False)).json()["error"]
            assert f"Use '{name}'" in error["message"]
    async with scripted(tmp_path / "b", "ok") as served:
        for fields, _ in SWITCHES:
            await prompt(served, [HI], **fields)


@pytest.mark.parametrize(("switch", "known"), [("enable_thinking", True), ("thinking", True), ("other", False)])
async def test_thinking_is_turned_off_by_a_switch_or_a_budget_of_nothing(
    tmp_path: Path, switch: str, known: bool
) -> None:
    """The template turns thinking off if it can; a template that knows efforts gets them."""
    end = f"{{% if {switch} is defined and not {switch} %}}<think></think>{{% endif %}}"
    knows = "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    off: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [HI], "reasoning_effort": "none"}),
        ("/v1/messages", {"messages": [HI], "max_tokens": 9, "thinking": {"type": "disabled"}}),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "none"}}),
    ]

    def asked(served: Served) -> tuple[str, int | None]:
        budget = served.engine.requests[-1].sampling.thinking
        return prompt_of(served).rpartition("assistant\n")[2], budget and budget.tokens

    for template, high in ((TEMPLATE + end, ""), (TEMPLATE + end + knows, "high")):
        async with scripted(tmp_path / f"_{high}", "Yes", template) as served:
            await post(served, messages=[HI])
            assert asked(served) == ("", None)
            for path, body in off:
                await post(served, path, **body)
                tail, budget = asked(served)
                assert tail.startswith("<think></think>") is known and budget == (None if known else 0), path
            answer = await post(served, "/v1/responses", input="hi", reasoning={"effort": "xhigh"})
            assert answer.json()["reasoning"]["effort"] == "xhigh" and asked(served)[0] == high
            body = {"messages": [HI], "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 1024}}
            await post(served, "/v1/messages", **body)
            assert asked(served)[1] == 1024


async def test_forms_in_the_places_of_other_servers(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [HI], "response_format": {"type": "json_object", "schema": schema}}),
        ("/v1/chat/completions", {"messages": [HI], "response_format": {"type": "json_schema", "schema": schema}}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object", "schema": schema}}}),
        (
            "/v1/messages",
            {"messages": [HI], "max_tokens": 9, "output_format": {"type": "json_schema", "schema": schema}},
        ),
    ]
    async with scripted(tmp_path, "ok") as served:
        for path, body in asked:
            answer = await post(served, path, **body)
            assert answer.status_code == 200, answer.text
            grammar = served.engine.requests[-1].sampling.grammar
            assert grammar is not None and json.loads(grammar.text)["properties"] == schema["properties"]


async def test_no_tools_beside_a_choice(tmp_path: Path) -> None:
    async with scripted(tmp_path, "ok") as served:
        for choice, status in (("auto", 200), ("none", 200), (None, 200), ("required", 400)):
            assert (await post(served, messages=[HI], tools=[], tool_choice=choice)).status_code == status
            answer = await post(served, "/v1/responses", input="x", tools=[], tool_choice=choice)
            assert answer.status_code == status


CHAT_ONLY = ("add_", "continue_", "chat_")


async def test_template_options_reach_the_template(tmp_path: Path) -> None:
    template = TEMPLATE + "{{ date_string }}|{{ depth.level }}|{{ enable_thinking }}|{{ bos_token }}"
    options = {"date_string": "1 Jan <|im_end|>", "depth": {"level": 3}, "enable_thinking": False, "unused": [1]}
    async with scripted(tmp_path, "ok", template) as served:
        written = await prompt(served, [HI], chat_template_kwargs=options)
        assert written.endswith("1 Jan <|im_end|>|3|False|")
        end = served.app.state.context.tokenizer.special_tokens["<|im_end|>"]
        assert served.engine.requests[-1].prompt_token_ids.count(end) == 1, "an option cannot forge a control token"
        for name in ("chat_template", "tools", "tokenize", "messages", "max_length"):
            answer = await post(served, messages=[HI], chat_template_kwargs={name: "x"})
            assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


async def test_the_answer_continues_the_last_message(tmp_path: Path) -> None:
    """The prompt ends with the text to continue, by chat with the field and by /v1/messages with a last assistant
    message."""
    turns = [HI, {"role": "assistant", "content": "The capital of <|im_end|>"}]
    async with scripted(tmp_path, " Rome", TEMPLATE) as served:
        chat = await post(served, messages=turns, continue_final_message=True, add_generation_prompt=False)
        assert chat.json()["choices"][0]["message"]["content"] == " Rome"
        await post(served, messages=turns, continue_final_message=True)
        parts = [{"type": "text", "text": turns[1]["content"]}]
        await post(served, "/v1/messages", messages=[HI, {**turns[1], "content": parts}], max_tokens=9)
        assert [prompt_of(served, i).split("\n", 3)[-1] for i in range(3)] == ["The capital of <|im_end|>"] * 3
        assert "assistant\nThe capital" in await prompt(served, turns), "without the field a new answer begins"
        assert prompt_of(served).endswith("assistant\n")
        assert not (await prompt(served, [HI], add_generation_prompt=False)).endswith("assistant\n")
        for fields, param in (
            ({"messages": [HI], "continue_final_message": True}, "continue_final_message"),
            ({"messages": [HI, CALLING], "continue_final_message": True}, "continue_final_message"),
            ({"messages": turns, "continue_final_message": True, "add_generation_prompt": True},
             "add_generation_prompt"),
        ):  # fmt: skip
            assert (await post(served, **fields)).json()["error"]["param"] == param


async def test_fields_beyond_the_limits_of_the_official_api(start_server: StartServer) -> None:
    served = await start_server("hello there, stop here")
    stops = ["a1", "b2", "c3", "d4", "stop", "e5"]
    answer = await post(served, messages=[HI], stop=stops, n=16, top_p=0, seed=1)
    assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["hello there, "] * 16
    assert 0 < served.engine.requests[0].sampling.top_p < 1e-5
    answer = await post(served, messages=[HI], stop=stops, include_stop_str_in_output=True)
    assert answer.json()["choices"][0]["message"]["content"] == "hello there, stop"
    answer = await post(served, "/v1/messages", messages=[HI], max_tokens=99, stop_sequences=stops)
    assert answer.json()["stop_sequence"] == "stop"
    answer = await post(served, "/v1/completions", prompt="x", n=128, max_tokens=1)
    assert len(answer.json()["choices"]) == 128


async def test_special_tokens_are_shown_on_request(start_server: StartServer, tokenizer: Tokenizer) -> None:
    special, end = (tokenizer.special_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
    served = await start_server(lambda _: Script([special, *tokenizer.encode("x"), end]))
    texts = []
    for shows in (None, True, False):
        answer = await post(served, messages=[HI], skip_special_tokens=shows)
        texts.append(answer.json()["choices"][0]["message"]["content"])
    assert texts == ["x", "x", "<|im_start|>x"]


async def test_tiers_and_their_classes(start_server: StartServer) -> None:
    """Paid tiers are served as default; flex requests run offline, and a stream of one is no batch line."""
    served = await start_server("hello")
    for path, body in (("/v1/chat/completions", {"messages": [HI]}), ("/v1/responses", {"input": "hi"})):
        for tier in ("priority", "scale", "auto", "default", "flex"):
            stated = "flex" if tier == "flex" else "default"
            answer = await post(served, path, **body, service_tier=tier)
            assert answer.json()["service_tier"] == stated and "hello" in answer.text
            request = served.engine.requests[-1]
            assert (request.request_class is RequestClass.ONLINE) is (stated == "default")
            assert request.lane is Lane.FLEX, "a client waits"
            streamed = await post(served, path, **body, service_tier=tier, stream=True)
            assert f'"service_tier":"{stated}"' in streamed.text.partition("\n\n")[0]
            assert not served.engine.requests[-1].final_only


async def test_a_request_without_a_model_gets_the_served_one(start_server: StartServer) -> None:
    served = await start_server("hello")
    for path, body in (
        ("/v1/chat/completions", {"messages": [HI]}), ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": [HI], "max_tokens": 9}),
    ):  # fmt: skip
        for fields in ({"model": None}, {"model": ""}):
            answer = await post(served, path, **{**body, **fields})
            assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


async def test_salts_separate_prefix_caches(start_server: StartServer) -> None:
    served = await start_server("hello")
    for salt in (None, "a", "b", "a"):
        await post(served, messages=[HI], cache_salt=salt)
    salts = [request.cache_salt for request in served.engine.requests]
    assert salts[1] == salts[3] and len(set(salts)) == 3


async def test_failed_calls_are_told_to_the_model(tmp_path: Path) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]}
    async with scripted(tmp_path, "ok") as served:
        for told, content in ((True, "boom"), (False, "boom"), (True, None)):
            result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": told}
            await post(served, "/v1/messages", messages=[HI, use, {"role": "user", "content": [result]}], max_tokens=9)
        written = [prompt_of(served, i).split("tool\n")[1].split("<|im_end|>")[0] for i in range(3)]
    assert written == ["Error: boom", "boom", "Error: "]


async def test_defaults_of_the_checkpoint_apply_to_unset_fields(tokenizer: Tokenizer) -> None:
    """A field of the request wins, also at the value that turns it off."""
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    engine = FakeEngine(say(tokenizer, "ok"), sampling=defaults)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [HI]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [HI], "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
    ]
    async with serve(engine, tokenizer) as served:
        for path, body in bodies:
            answer = await post(served, path, **body)
            sampling = engine.requests[-1].sampling
            values = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty)
            assert values == tuple(defaults), path
        assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.6, 0.95)
        off: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": -1, "repetition_penalty": 1}
        await post(served, messages=[HI], **off)
        sampling = engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1, 1, 0, 1)


async def test_answers_hold_no_null_where_the_published_schema_wants_a_text(start_server: StartServer) -> None:
    served = await start_server("hello")
    for path, body in (("/v1/chat/completions", {"messages": [HI]}), ("/v1/completions", {"prompt": "hi"})):
        whole = (await post(served, path, **body)).json()
        streamed = (await post(served, path, **body, stream=True)).text
        assert "system_fingerprint" not in whole and "system_fingerprint" not in streamed
