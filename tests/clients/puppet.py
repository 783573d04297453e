"""A server whose model says the words that the client plans for it: calls of tools and answers after them.

A message may hold `<<JSON>>` for each turn of the model: a string is the answer, a list of [name, arguments] are calls.
The n-th turn of the conversation uses the n-th answer.
"""

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import tokenizer_folders
from fake_engine import FakeEngine, Script, Served, serve
from test_tools import TEMPLATE

from engine.api import EngineRequest
from engine.text.tokenizer import Tokenizer

MODEL = "puppet"
_PLANS = re.compile(r"""<<(\\?"[^<>]*?"|[\[{].*?[\]}])>>""", re.DOTALL)
KNOWN = {
    "value of magic_function(3)": [["magic_function", {"input": 3}]],
    "Create a customer named '你好啊集团'": [["unicode_customer", {"customer_name": "你好啊集团"}]],
    "Create a customer named 'こんにちは株式会社'": [["unicode_customer", {"customer_name": "こんにちは株式会社"}]],
    "to a joke about cats, no punchline": '{"setup": "Why do cats sit?"}',
    "joke about cats": '{"setup": "Why do cats sit?", "punchline": "They can."}',
}
"""Parts of questions that LangChain's standard tests ask, and the turn that they expect."""


def turn(prompt: str) -> str:
    """Return the text of the model's turn that the prompt asks for."""
    number = prompt.count("<|im_start|>assistant") - 1
    plans = [_plan(text) for text in _PLANS.findall(prompt)]
    plans = plans or [plan for question, plan in KNOWN.items() if question in prompt][:1]
    if number >= len(plans):
        return "Done."
    plan = plans[number]
    return plan if isinstance(plan, str) else "\n".join(map(_call, plan))


def _plan(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # some agents quote the user's text
        return json.loads(text.replace(r"\"", '"'))


def _call(call: Sequence[object]) -> str:
    name, arguments = call
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@asynccontextmanager
async def puppet_server(folder: Path) -> AsyncIterator[Served]:
    tokenizer = Tokenizer.load(tokenizer_folders.byte_level(folder, TEMPLATE), probe=False)
    eos = tokenizer.eos_token_id
    assert eos is not None

    def script(request: EngineRequest) -> Script:
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return Script([*tokenizer.encode(turn(prompt)), eos], burst=3)

    engine = FakeEngine(script, eos_token_ids=frozenset({eos}), max_model_len=262_144, cache_tokens=400_000)
    async with serve(engine, tokenizer, served_model_name=(MODEL,)) as served:
        yield served
