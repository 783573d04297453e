"""Tokenizers and chat templates of published models, beside transformers, and behind tiny random models.

TIDEMILL_TOKENIZERS names a folder with a folder for each tokenizer: tokenizer.json and tokenizer_config.json, as a
checkpoint has them.
"""

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import tiny_transformers
from test_detokenizer import pushed
from tiny_wrappers import wrapper

from engine.errors import InvalidRequestError
from engine.models.hub import choose
from engine.text.detokenizer import detokenizer_for
from engine.text.tokenizer import Tokenizer
from tidemill import LLM

FOLDER = Path(os.environ.get("TIDEMILL_TOKENIZERS", ""))
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/tokenizer.json")) if FOLDER.name else []
pytestmark = [
    pytest.mark.manual,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not NAMES, reason="TIDEMILL_TOKENIZERS names no folder of tokenizers"),
]
MODELS = {"gemma3": "gemma3", "deepseek": "deepseek_v3", "gpt": "gpt_oss", "qwen3": "qwen3"}
"""Models by the beginning of a tokenizer's name; others are Llama."""
TEXTS = [
    "Hello world", " leading space", "  two", "\n\n new\tline ", "naïve café", "東京は日本の首都です。",
    "안녕하세요 세계", "👩‍👩‍👧‍👦 family 🇫🇷 flags 🙂🙃", "e\u0301 combining",
    "x = {'a': [1, 2]}\n    return x", "مرحبا بالعالم", "𝔘𝔫𝔦 𓀀 🜁", "", " ", "a  b   c    d",
    "12345 67.89 0x1F", "<think>no</think> <b>", "▁ under Ġ Ċ ▂", "\u200bzero\ufeff width",
    "\r\n",
]  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich 🏔"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": " Where is 東京? 🙂 "}],
    "system": [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and\n\n 2 + 2? "},
    ],
    "thinking": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
        {"role": "user", "content": "sure?"},
    ],
    "calls": [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": '{"degrees": 21}'},
    ],
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["red 🟥", "東京", "a\"b"]},
                   "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 999},
              "maxItems": 3}},
    "required": ["name", "kind", "sizes"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(name: str) -> Tokenizer:
    return Tokenizer.load(FOLDER / name)


@pytest.fixture(scope="module")
def theirs(name: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(FOLDER / name)


def test_tokens_and_text_are_those_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    numbers = random.Random(0)
    for text in [*TEXTS, "".join(TEXTS)]:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special), text
        ids = theirs.encode(text, add_special_tokens=False)
        check_stream(ours, theirs, ids, [1] * len(ids))
    for _ in range(300):
        ids = [numbers.randrange(ours.vocab_size) for _ in range(numbers.randrange(1, 30))]
        check_stream(ours, theirs, ids, [numbers.randrange(4) for _ in ids])


def check_stream(ours: Tokenizer, theirs: Any, ids: list[int], sizes: list[int]) -> None:
    for skip in (True, False):
        cuts, begin = [], 0
        for size in sizes:
            cuts.append(ids[begin : begin + size])
            begin += size
        detokenizer = detokenizer_for(ours, skip_special_tokens=skip)
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert pushed(detokenizer, [*cuts, ids[begin:]]) == expected, ids


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["", "tools"])
@pytest.mark.parametrize("chat", CHATS)
def test_chats_are_rendered_as_by_transformers(
    chat: str, tools: list[dict[str, Any]] | None, options: dict[str, bool], ours: Tokenizer, theirs: Any
) -> None:
    if theirs.chat_template is None:
        pytest.skip("no chat template")
    written = json.loads(json.dumps(CHATS[chat]))
    for call in written[1].get("tool_calls", ()) if len(written) > 1 else ():
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    for prompts in (True, False):
        found = []
        for messages in (CHATS[chat], written):
            try:
                found.append(theirs.apply_chat_template(
                    copy.deepcopy(messages), tools=tools, add_generation_prompt=prompts, tokenize=True,
                    return_dict=False, **options,
                ))  # fmt: skip
            except Exception:  # the template refuses it
                continue
        dropped = chat == "calls" and not any('"city"' in theirs.decode(ids)[-300:] for ids in found)
        if not found or dropped:
            continue  # ours folds messages that a template refuses, and calls that it drops
        assert ours.encode_chat(written, tools=tools, add_generation_prompt=prompts, **options) in found


def model_type(name: str) -> str:
    return next((kind for start, kind in MODELS.items() if name.startswith(start)), "llama")


@pytest.fixture(scope="module")
def checkpoint(name: str, ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in its published layout behind the tokenizer."""
    folder = tmp_path_factory.mktemp(name)
    kind, sizes = model_type(name), {"vocab_size": ours.vocab_size, "max_position_embeddings": 4096}
    if kind == "gemma3":
        wrapper(kind, folder, **sizes)
    else:
        tiny_transformers.save(kind, folder, **sizes)
    for file in (FOLDER / name).iterdir():
        shutil.copy(file, folder)
    return folder


def test_answers_end_at_the_end_tokens_and_follow_a_schema(name: str, ours: Tokenizer, checkpoint: Path) -> None:
    ends = ours.ends_at(choose(checkpoint, "auto").shape.eos_token_ids)
    assert ours.eos_token_id in ends
    valid = jsonschema_rs.validator_for(SCHEMA)
    kinds: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with LLM(str(checkpoint), dtype="float32", profile_seconds=0.0, threads=1, max_model_len=2048) as llm:
        try:
            ours.encode_chat(CHATS["user"])
            ask: Any = llm.chat
        except InvalidRequestError:
            ask = llm.generate
        for end in sorted(ends):
            assert ask(["Hi"], logit_bias={str(end): 100.0}, temperature=0, max_tokens=5) == [""], end
        if ours.has_channels:
            return  # without a channel there is no answer
        for answer in ask(["Hi 🙂"] * 12, response_format=kinds, temperature=1.0, seed=3, max_tokens=900):
            valid.validate(json.loads(answer))
