"""Builds the demo model's tokenizer and chat template, and turns dialogues into token ids.

A message's content is always encoded as plain text (``split_special_tokens=True``), so text such as ``<|im_end|>``
inside a message cannot forge a role. Knows nothing about the corpus or about training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2560
CONTEXT = 2048

#: contents are trimmed, so that encoding them apart from the frame gives the same ids as encoding the whole
CHAT_TEMPLATE = """\
{%- if tools -%}
  {{- '<|im_start|>system\\nTools:' -}}
  {%- for tool in tools -%}
    {{- ' ' ~ tool.function.name ~ '(' ~ ((tool.function.parameters or {}).properties or {}) | join(', ') ~ ')' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role not in ['system', 'developer', 'user', 'assistant', 'tool'] -%}
    {{- raise_exception('unknown role: ' ~ message.role) -}}
  {%- endif -%}
  {%- set role = 'system' if message.role == 'developer' else message.role -%}
  {{- '<|im_start|>' ~ role ~ '\\n' -}}
  {%- if message.content is string -%}
    {{- message.content | trim -}}
  {%- elif message.content -%}
    {%- for part in message.content if part.type == 'text' -%}
      {{- part.text | trim -}}{{- '' if loop.last else '\\n' -}}
    {%- endfor -%}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '\\n' if message.content or not loop.first else '' -}}
    {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson -}}
    {{- '}\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
#: words with a leading space, numbers of up to three digits (a space before them is a token of its own, so that "7 + 8"
#: and "7+8" hold the same numbers), runs of punctuation, line breaks, other space
_PIECES = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n|[^\S\n]+(?!\S)|\s"


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn a byte-level BPE of `VOCAB_SIZE` tokens; ids 0-2 are the special tokens."""
    tokenizer = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [END_OF_TEXT, TURN, END_OF_TURN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


class DialogueEncoder:
    """Messages -> token ids and, for every id, whether the model is to learn to write it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.turn, self.end = tokenizer.convert_tokens_to_ids([TURN, END_OF_TURN])
        self.newline = self.plain("\n")

    def plain(self, text: str) -> list[int]:
        """Ids of ``text`` in which nothing is a special token."""
        ids: list[int] = self.tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        return ids

    def encode(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """The whole dialogue, as the chat template frames it, without a generation prompt."""
        ids: list[int] = []
        learn: list[bool] = []
        for message in messages:
            head = [self.turn, *self.plain(message["role"]), *self.newline]
            body = [*self.plain(message["content"].strip()), self.end]
            ids += head + body + self.newline
            learn += [False] * len(head) + [message["role"] == "assistant"] * len(body) + [False] * len(self.newline)
        return ids, learn

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The dialogue followed by the generation prompt."""
        return self.encode(messages)[0] + [self.turn, *self.plain("assistant"), *self.newline]
