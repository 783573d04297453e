"""The training of the packaged demo model: its corpus, its packing, what it learned, and the script that makes it."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_demo_model import conversation, model, tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.demo_training import formal
from benchmarks.demo_training.corpus import Corpus
from benchmarks.demo_training.phrases import held_out
from benchmarks.demo_training.tokenizer import DialogueEncoder
from benchmarks.demo_training.train import WEIGHTS, Settings, greedy_matches, packed, train


@pytest.mark.parametrize("text", ["Hi", "a\n\nb", "  7+8 = ?  ", "Grüße 你好 🌊", "-1", "\tx\n", ""])
def test_encoding_contents_apart_equals_encoding_the_rendered_whole(text: str) -> None:
    messages = conversation(text, "Yes.", "ok", system="Be brief.")
    whole = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert DialogueEncoder(tokenizer()).prompt(messages) == whole


def test_tools_and_calls_are_framed_as_they_were_trained_on() -> None:
    """What a client sends as tools, calls and results has the ids of the dialogues of the tool."""
    function = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    other = {"name": "lights", "parameters": {}}
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "São Paulo"}}}
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": "And in São Paulo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    tools = [{"type": "function", "function": each} for each in (function, other)]
    ids = tokenizer().apply_chat_template(sent, tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"]
    rng = random.Random(0)
    tool = formal.Tool("get_weather", "city", formal.tools_message(["get_weather(city)", "lights()"]))
    asked, called, *_ = formal.weather_exchange(rng, tool, "And in São Paulo?", "São Paulo")
    trained = [tool.system, asked, called, {"role": "tool", "content": "rain"}]
    assert DialogueEncoder(tokenizer()).prompt(trained) == ids
    twice = tokenizer().apply_chat_template([{**sent[1], "content": "So:", "tool_calls": [call, call]}], tokenize=False)
    assert twice.count("\n<tool_call>\n") == 2 and twice.count("\n</tool_call>") == 2


def test_held_out_wordings_are_not_trained_on() -> None:
    first, again, other = (list(itertools.islice(Corpus(seed).dialogues(), 300)) for seed in (5, 5, 6))
    assert first == again != other
    corpus = Corpus(3)
    plain = [corpus.item() for _ in range(2000)]
    reserved = [item for item in plain if corpus.reserved(item)]
    assert len(reserved) > 20
    assert all(held_out(item.question) for item in reserved)
    assert not any(corpus.reserved(corpus.training_item()) for _ in range(2000))
    assert len(corpus.tests(200)) == 200
    asked = {m["content"] for dialogue in itertools.islice(corpus.dialogues(), 3000) for m in dialogue}
    reserved_too = {
        next(m["content"] for m in test.messages if m["role"] == "user") for test in corpus.tests_of_fixed_form(100)
    }
    assert all(map(held_out, reserved_too)) and len(reserved_too) > 150 and not asked & reserved_too


def test_held_out_questions_in_float32_and_bfloat16() -> None:
    items = Corpus(99).tests(120)
    encoder = DialogueEncoder(tokenizer())
    full = greedy_matches(model(), encoder, items)
    half = greedy_matches(LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=torch.bfloat16).eval(), encoder, items)
    assert sum(full) >= 0.6 * len(items)
    assert sum(a == b for a, b in zip(full, half, strict=True)) >= 0.95 * len(items)


def test_held_out_calls_and_forms_are_filled_in() -> None:
    """Word for word, in all turns; words that mean nothing are among them, and have to be copied."""
    tests = Corpus(98).tests_of_fixed_form(40)
    right = greedy_matches(model(), DialogueEncoder(tokenizer()), tests)
    for category in ("tool", "json"):
        found = [good for test, good in zip(tests, right, strict=True) if test.category == category]
        assert sum(found) >= 0.4 * len(found), category


def test_packed_rows_hold_whole_dialogues_and_weigh_only_answers() -> None:
    settings = Settings(row_lengths=(128, 512), tokens=1024)
    batch = next(packed(Corpus(1), DialogueEncoder(tokenizer()), settings))
    starts = batch.positions == 0
    assert (batch.ids[starts][:8] != tokenizer().eos_token_id).all()
    for ids, weights in zip(batch.ids, batch.weights, strict=True):
        text = tokenizer().decode(ids[weights > 0])
        assert "<|im_start|>" not in text
        assert text.count("<|im_end|>") == tokenizer().decode(ids).count("<|im_start|>assistant")


def test_training_script_writes_a_loadable_folder(tmp_path: Path) -> None:
    tiny = Settings(
        hidden=64, layers=2, heads=4, ffn=48, row_lengths=(128,), tokens=256, steps=2, vocabulary_dialogues=300
    )
    table = train(tmp_path, tiny, minutes=1, questions=10)
    assert "of   12" in table.splitlines()[-1]
    made = LlamaForCausalLM.from_pretrained(tmp_path)
    own = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(own) == made.config.vocab_size
    assert "json " in table and "tool " in table
    again = train(tmp_path / "more", tiny, questions=10, start=tmp_path)
    assert again.count("\n") == table.count("\n")
    assert (tmp_path / "more" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    ids = own.apply_chat_template(conversation("Hi"), add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert made.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
