"""One model for every engine: a Llama of 134.5 M random parameters on disk, with a tokenizer of as many words.

Engines differ with checkpoints without weights and with ids without text, so both are here: weights of
one seed, and a byte-level vocabulary in which every id is printable and every common word costs one token.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.live import CONFIG
from loadgen.plan import ANCHOR, WORDS, WordCosts

LAYERS: int = CONFIG["num_hidden_layers"]
CONTEXT = 4096
"""Context in tokens, for prompts of 2,048 tokens and their answers."""
SPACE = "Ġ"
"""How a byte-level vocabulary writes a space."""
ENDLESS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
"""Not every server knows `ignore_eos`: the model has no end."""


def merges_of(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield merges, some twice: each word grows letter by letter, then pairs, triples and fours of letters."""
    for word in words:
        yield from ((word[:end], word[end]) for end in range(1, len(word)))
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    yield from ((pair[0], pair[1]) for pair in pairs)
    yield from product(pairs, ascii_lowercase)
    yield from product(pairs, pairs)


def make_tokenizer(path: Path, size: int) -> WordCosts:
    """Writes a tokenizer.json of exactly `size` ids; returns what words cost in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<|endoftext|>": 0}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for left, right in merges_of([ANCHOR, *(SPACE + word for word in WORDS)]):
        if len(vocabulary) == size:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    costs = tuple(len(tokenizer.encode(f" {word}").ids) for word in WORDS)
    return WordCosts(WORDS, costs, len(tokenizer.encode(ANCHOR).ids))


def make_checkpoint(folder: Path, dtype: str, layers: int = LAYERS) -> WordCosts:
    """Write config, tokenizer and safetensors of `dtype` ("bfloat16", "float32") into `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": layers, "max_position_embeddings": CONTEXT}
    config = {**CONFIG, **ENDLESS, "torch_dtype": dtype, **sizes}
    torch.manual_seed(0)
    settings = AutoConfig.for_model(**config)
    AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(ENDLESS))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return make_tokenizer(folder / "tokenizer.json", config["vocab_size"])
