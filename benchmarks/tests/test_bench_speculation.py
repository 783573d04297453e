"""The copying model computes what the small one computes; its tasks and the figures of `benchmarks speculation`."""

import argparse
import json
import random
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import copying_model
from benchmarks.copying_tasks import GROUNDED, Task, ticket
from benchmarks.live import PACKAGED
from benchmarks.speculation import Run, Spell, make_load, ratios, show


def test_the_wide_model_computes_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 80}
    monkeypatch.setattr(copying_model, "WIDE", sizes)
    monkeypatch.setattr(copying_model, "LAYERS", 4)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, head_dim=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=True, rms_norm_eps=1e-12,
    )  # fmt: skip
    small = LlamaForCausalLM(config).eval()
    for parameter in small.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    large = copying_model.widen(small).eval()
    ids = torch.randint(0, 50, (2, 20))
    with torch.inference_mode():
        found, expected = large(input_ids=ids).logits, small(input_ids=ids).logits
    assert large.num_parameters() > 3 * small.num_parameters()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("task", [*GROUNDED.values(), ticket])
def test_answers_of_grounded_tasks_use_the_words_of_the_prompt(task: Task) -> None:
    rng, again = random.Random(1), random.Random(1)
    known = 0
    for _ in range(50):
        question, answer = task(rng)
        assert (question, answer) == task(again)
        known += sum(word.strip('",:{}') in question for word in answer.split()) / len(answer.split())
    assert known / 50 > (0.25 if task is ticket else 0.45)  # a ticket's form is the same in all answers


def test_training_mixes_the_tasks_and_chat_and_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_model, "QUESTIONS", 3)
    model = LlamaForCausalLM.from_pretrained(PACKAGED, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(PACKAGED)
    dialogues = copying_model.Dialogues(model.eval(), tokenizer)
    drawn = list(islice(dialogues.draw(), 60))
    starts = {tokenizer.decode(ids[:prompt]).split("\n")[1].split()[0] for ids, prompt in drawn}
    assert {"Quote", "Give", "Write", "Rename", "As", "Ticket:"} < starts
    with torch.inference_mode():
        before = float(copying_model.loss_of(model, drawn[:8]))
    assert copying_model.fit(model, cycle(drawn[:8]), 6) < before


def test_both_arms_of_a_round_get_the_same_requests_and_another_round_others() -> None:
    options = argparse.Namespace(requests=5, lines=3, rate=1.0, seconds=20.0)
    first, again, other = make_load(options, 0), make_load(options, 0), make_load(options, 1)
    assert first == again
    assert (len(first.grounded), len(first.chat), len(first.lines)) == (5, 15, 3)
    assert not [body for body in first.grounded if body in other.grounded]
    assert all(body["messages"][-1]["role"] == "user" for body in (*first.grounded, *first.chat, *first.lines))
    json.dumps(first.lines)


def test_ratios_are_paired_by_round_and_count_changed_answers() -> None:
    off = Run(
        Spell(10.0, 1000, 1000, ["a"]), Spell(5.0, 100, 100, ["b"]), Spell(20.0, 4000, 100, ["c", "d"]), 0.9, 50.0
    )
    on = replace(
        off, grounded=Spell(5.0, 1000, 250, ["a"]), job=Spell(16.0, 4000, 50, ["c", "x"]), kept=0.95, offline=60.0
    )
    text = ratios({"on": [on, on], "off": [off, off]})
    assert "grounded 2.00 x, chat 1.00 x, job 1.25 x, offline beside chats 1.20 x" in text
    assert "+5.0 points; 2 of 8 answers changed" in text
    assert show("on", [on]).split() == ["on", "200.0", "4.00", "20.0", "1.00", "0.12", "80.00", "95.0%", "60"]
