"""Small tokenizers built for tests, saved as checkpoints save them: byte-level BPE, Llama-2 style BPE, Unigram.

Each is built once per test run; `load` and `reference` are ours and transformers' reading of the same folder.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.text import tokenizer as text

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again; the dog sleeps.",
    "a system message, a user message and an assistant message",
    "naïve café 東京 жизнь 🙂 done\n\nnew paragraph   with  spaces",
    "hello world, hello there, stop here and stop now",
] * 3

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }} {{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant here, not ' + message.role) }}{% endif %}{% endfor %}"
)


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level(folder: Path, chat_template: str | None = CHATML, **config: Any) -> Path:
    """Qwen-like: specials outside the vocabulary, and <think> added but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "Qwen2Tokenizer", **config}
    return save(folder, tokenizer, **config, **({"chat_template": chat_template} if chat_template else {}))


def llama2(folder: Path, *, legacy: bool = True, chat_template: str | None = LLAMA_CHAT) -> Path:
    """SentencePiece-like BPE with byte fallback; `legacy` puts a space before every piece between special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    pieces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials + byte_tokens, show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    layout = json.loads(tokenizer.to_str())  # in a real file only the three are added tokens
    layout["added_tokens"] = layout["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    if legacy:
        tokenizer.pre_tokenizer = None  # type: ignore[assignment]
        tokenizer.normalizer = pieces
    else:
        tokenizer.pre_tokenizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    return save(folder, tokenizer, **config, **({"chat_template": chat_template} if chat_template else {}))


def unigram(folder: Path, chat_template: str | None = LLAMA_CHAT) -> Path:
    """A vocabulary that can spell its own special tokens: the pieces <s> and </s> cost nothing."""
    letters = sorted({char for text in CORPUS for char in text if char.strip()} | set("<>/[]INST"))
    words = ["▁the", "▁hello", "▁world", "▁stop"]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -3.0)]
    vocab += [(word, -4.0) for word in words] + [(char, -6.0) for char in letters]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save(folder, tokenizer, **config, **({"chat_template": chat_template} if chat_template else {}))


def words(folder: Path) -> Path:
    """No decoder at all: words joined by spaces, as in toy checkpoints."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "[END]", "alpha", "beta", "gamma", "é", "\ufffd"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), behavior="removed")
    tokenizer.add_special_tokens(["[END]"])
    return save(folder, tokenizer, eos_token="[END]")


@functools.cache
def folder(name: str) -> Path:
    """The folder of one of the tokenizers above, built at the first call; it lives as long as the test run."""
    build = {
        "byte_level": byte_level,
        "llama2": llama2,
        "llama2_new": functools.partial(llama2, legacy=False),
        "unigram": unigram,
        "words": words,
    }[name]
    root = Path(tempfile.mkdtemp(prefix="tidemill-tokenizers-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return build(root / name)


@functools.cache
def load(name: str) -> text.Tokenizer:
    return text.Tokenizer.load(folder(name), probe=False)


@functools.cache
def reference(name: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder(name))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]
