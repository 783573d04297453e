"""LiteLLM as a library, over its providers openai, hosted_vllm and anthropic, and as a proxy in front of the server."""

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import litellm
import openai
from steps import ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, call, end, plan, step

begin("litellm")
litellm.suppress_debug_info = True
OPTIONS: Any = {"model": f"openai/{DEMO}", "api_base": f"{DEMO_URL}/v1", "api_key": "none", "temperature": 0}
MESSAGES: Any = [{"role": "user", "content": ASK}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


@step("completion, whole and streamed with usage, for openai, hosted_vllm and anthropic")
def _() -> None:
    for provider, base in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")):
        options = {**OPTIONS, "model": f"{provider}/{DEMO}", "api_base": DEMO_URL + base}
        whole = litellm.completion(messages=MESSAGES, **options)
        chunks = list(
            litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options)
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content and "Paris" in text, provider
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, provider


@step("tools, and the message sent back")
def _() -> None:
    options = {**OPTIONS, "model": f"openai/{PUPPET}", "api_base": f"{PUPPET_URL}/v1"}
    told = plan([call("get_weather", city="Seoul")], "It is foggy.")
    messages: list[Any] = [{"role": "user", "content": told}]
    message = litellm.completion(messages=messages, tools=TOOLS, **options).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Seoul"}
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "fog"}]
    assert litellm.completion(messages=messages, tools=TOOLS, **options).choices[0].message.content == "It is foggy."


@step("response_format, text_completion, embedding")
def _() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    asked = [{"role": "user", "content": PERSON}]
    answer = litellm.completion(messages=asked, response_format=form, **OPTIONS).choices[0].message.content
    assert set(json.loads(answer)) == {"name"}
    text = {**OPTIONS, "model": f"text-completion-openai/{DEMO}"}
    assert litellm.text_completion(prompt="The capital of France", max_tokens=8, **text).choices[0].text
    assert litellm.embedding(input=["a"], **{k: v for k, v in OPTIONS.items() if k != "temperature"}).data[0][
        "embedding"
    ]


@step("responses, whole and streamed; messages over chat")
def _() -> None:
    assert "Paris" in litellm.responses(input=ASK, **OPTIONS).output[0].content[0].text
    assert [event.type for event in litellm.responses(input=ASK, stream=True, **OPTIONS)][-1] == "response.completed"
    assert asyncio.run(litellm.anthropic.messages.acreate(messages=MESSAGES, max_tokens=30, **OPTIONS))


@step("files and batches")
def _() -> None:
    body = {"model": DEMO, "messages": MESSAGES, "max_tokens": 20}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    options: Any = {"custom_llm_provider": "openai", "api_base": f"{DEMO_URL}/v1", "api_key": "none"}
    file = litellm.create_file(file=("b.jsonl", json.dumps(line).encode()), purpose="batch", **options)
    batch = litellm.create_batch(
        completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id, **options
    )
    while batch.status not in ("completed", "failed"):
        time.sleep(0.1)
        batch = litellm.retrieve_batch(batch_id=batch.id, **options)
    assert b"Paris" in litellm.file_content(file_id=batch.output_file_id, **options).content
    litellm.file_delete(file_id=file.id, **options)


@step("the proxy: chat, whole and streamed, through openai")
def _() -> None:
    key = "sk-2f7c1d9a8b64e305"
    config = {
        "model_list": [{"model_name": "ours", "litellm_params": OPTIONS}],
        "general_settings": {"master_key": key},
    }
    Path("proxy.yaml").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["litellm", "--config", "proxy.yaml", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([str(Path(sys.executable).with_name(words[0])), *words[1:]])
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness").close()
                break
            except OSError:
                assert process.poll() is None, "the proxy ended"
                time.sleep(0.2)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
        whole = client.chat.completions.create(model="ours", messages=MESSAGES)
        stream = client.chat.completions.create(model="ours", messages=MESSAGES, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == whole.choices[0].message.content and "Paris" in text
    finally:
        process.terminate()
        process.wait(30)


end()
