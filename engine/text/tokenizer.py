"""Tokenizer of a checkpoint. Loads no torch: transformers' fast tokenizer reads `tokenizer.json`, without code from the
checkpoint. All methods are thread-safe.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from engine.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelLoadError
from engine.panics import as_error
from engine.text.chat_template import ChatTemplate, complete, encode_text
from engine.text.detokenizer import detokenizer_for, read_byte_rule
from engine.text.renderer import shared_renderer
from engine.text.template_probe import TemplateFacts, probe_templates

CHANNEL_TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"})
"""Special tokens of tokenizers for the harmony format, in which every answer consists of messages in channels."""
_CHANNEL_ENDS = ("<|return|>", "<|call|>")
_NO_TEMPLATE = "This model has no chat template; use /v1/completions, or start the server with --chat-template."


class Tokenizer:
    """A checkpoint's tokenizer with its chat template. Create it with `load`."""

    def __init__(self, backend: Any, chat: ChatTemplate | None) -> None:
        """Wrap `backend`, a transformers fast tokenizer."""
        self._tokenizer: tokenizers.Tokenizer = backend.backend_tokenizer
        self._chat = chat
        self.call_template = _call_template(getattr(backend, "response_template", None))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = {token.content: i for i, token in added.items() if token.special}
        """Special tokens by text; they are hidden in the text of answers."""
        self.atomic_tokens: Mapping[str, int] = {
            token.content: i
            for i, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        """Tokens by text that grammars write by their ids: the grammar library takes no added `<...>` for its text."""
        self._special_ids = frozenset(self.special_tokens.values())
        self.has_channels = self.special_tokens.keys() >= CHANNEL_TOKENS
        layout: dict[str, Any] = json.loads(self._tokenizer.to_str())
        self.byte_rule = read_byte_rule(layout["decoder"])
        """Conversion of single tokens to bytes; None if tokens do not decode independently."""
        self._bytes: dict[int, bytes | None] = {}
        self._max_token_chars = _max_token_chars(self._tokenizer, layout["model"])
        self.eos_token_id: int | None = backend.eos_token_id
        self.bos_token_id: int | None = backend.bos_token_id
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], chat_template: str | os.PathLike[str] | None = None, *, probe: bool = True
    ) -> "Tokenizer":
        """Read the tokenizer in a checkpoint's folder.

        `chat_template`, a file or the text of a template, replaces that of the checkpoint. With `probe` the template is
        first run in a process with limits (about a second) and refused if it does not end or produces huge output.
        Raises ModelLoadError if there is no usable tokenizer, ConfigError if the template file cannot be read.
        """
        backend = _load_backend(Path(folder))
        if chat_template is not None:
            backend.chat_template = read_template(chat_template)
        sources = _template_sources(backend)
        if not sources:
            return cls(backend, None)
        backend.chat_template = sources
        facts = probe_templates(sources, backend.special_tokens_map) if probe else TemplateFacts()
        if facts.error is not None:
            raise ModelLoadError(f"the chat template cannot be used: {facts.error}")
        return cls(backend, _chat_template(backend, sources, facts))

    @property
    def chat_template_text(self) -> str:
        """Text of the template, or of all templates joined; empty without one."""
        return "" if self._chat is None else self._chat.text

    def least_tokens(self, texts: Iterable[str]) -> int:
        """Return a lower bound of the total number of tokens of the texts, by length only; 0 if there is none.

        White space around a text does not count, because templates may strip it.
        """
        return -(-sum(len(text.strip()) for text in texts) // self._max_token_chars) if self._max_token_chars else 0

    def check_length(self, texts: Iterable[str], max_model_len: int, param: str) -> None:
        """Raise ContextLengthError for texts that cannot fit into the context by their length: tokenizing megabytes
        takes seconds."""
        least = self.least_tokens(texts)
        if least >= max_model_len:
            message = f"This model's context is {max_model_len} tokens; the prompt has at least {least}."
            raise ContextLengthError(message, param=param)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a raw prompt; text of special tokens becomes the tokens."""
        return encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens, param="prompt")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a conversation in OpenAI's form; text of special tokens stays plain text.

        Slow for long conversations: call it in a worker thread. Raises InvalidRequestError if there is no template or
        it refuses the messages.
        """
        if self._chat is None:
            raise InvalidRequestError(_NO_TEMPLATE, param="messages", code="chat_template_missing")
        return self._chat.encode(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs)

    def ends_at(self, ids: frozenset[int]) -> frozenset[int]:
        """Return the end tokens of answers: `ids`, with the end marks of the chat template or of the harmony format."""
        if self.has_channels:
            return ids | {self.special_tokens[end] for end in _CHANNEL_ENDS}
        return ids if self._chat is None else self._chat.ends_at(ids)

    def shown_ends(self, ids: frozenset[int]) -> str:
        """Return the end tokens of answers as text, for logs."""
        names = [f"{self.token_name(end) or 'unknown'} ({end})" for end in sorted(self.ends_at(ids))]
        return ", ".join(names) or "max_tokens only: the model names no end token"

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids alone, equal to the whole output of `detokenizer_for` without a prompt."""
        detokenizer = detokenizer_for(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token_name(self, token_id: int) -> str:
        """Return the vocabulary's entry of a token, in which spaces and bytes have other characters; empty for an
        unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, special tokens included; empty for an unknown id."""
        if self.byte_rule is None:
            return self.decode_window([token_id], False).encode()
        return self.visible_bytes(token_id, False) or b""

    def visible_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes | None:
        """Return the bytes of a token; None for an unknown id and for a skipped special token."""
        if skip_special_tokens and token_id in self._special_ids:
            return None
        try:
            return self._bytes[token_id]
        except KeyError:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            piece = None if token is None or self.byte_rule is None else self.byte_rule.token_bytes(token)
            return self._bytes.setdefault(token_id, piece)

    def decode_window(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids by the checkpoint's own decoder."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _load_backend(folder: Path) -> Any:
    """Load transformers' fast tokenizer from `tokenizer.json`.

    `AutoTokenizer` would load torch and might rebuild the tokenizer by a class that the checkpoint names.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        convert = (
            f"from transformers import AutoTokenizer as A; A.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
        raise ModelLoadError(f'{folder} has no tokenizer.json; make it with: python -c "{convert}"')
    try:
        backend = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as raised:  # the library raises various types for broken files
        error = as_error(raised)
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise ModelLoadError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one text need no threads
    backend.backend_tokenizer.no_truncation()
    backend.backend_tokenizer.no_padding()
    return backend


def read_template(source: str | os.PathLike[str]) -> str:
    """Return the template given as text or file; a text contains Jinja's braces."""
    if isinstance(source, str) and "{" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"--chat-template {os.fspath(source)}: {reason}") from error


def _call_template(response_template: Any) -> str:
    """Return the checkpoint's own format of function calls as JSON: the field `tool_calls` of its response template;
    empty if there is none."""
    fields = response_template.get("fields") if isinstance(response_template, Mapping) else None
    return json.dumps(fields["tool_calls"]) if isinstance(fields, Mapping) and "tool_calls" in fields else ""


def _template_sources(backend: Any) -> dict[str, str]:
    template = backend.chat_template
    if not template:
        return {}
    named = template if isinstance(template, Mapping) else {"default": str(template)}
    return {name: complete(source) for name, source in named.items()}


def _chat_template(backend: Any, sources: Mapping[str, str], facts: TemplateFacts) -> ChatTemplate:
    main = sources.get("default") or next(iter(sources.values()))
    renderer = shared_renderer()
    renderer.warm_up()

    def render(messages: list[dict[str, Any]], *, tools: Any, **options: Any) -> str:
        """Render as `apply_chat_template`, but keep a content of None if the template reads it."""
        if not facts.bare_calls:
            messages = [{name: value for name, value in each.items() if value is not None} for each in messages]
        template = main if tools is None or facts.bare_calls else sources.get("tool_use", main)
        return renderer.render(template, messages, {**backend.special_tokens_map, "tools": tools, **options})

    return ChatTemplate(render, backend.backend_tokenizer, sources, facts)


def _max_token_chars(tokenizer: tokenizers.Tokenizer, model: Mapping[str, Any]) -> int | None:
    """Return the characters of the longest token; None if a token may represent an unlimited number of characters.

    Known characters are spelled with at least as many characters.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    knows_bytes = model.get("byte_fallback") or vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    one_by_one = model["type"] == "BPE" and model.get("unk_token") and not model.get("fuse_unk")
    return max(map(len, vocabulary)) if knows_bytes or one_by_one else None
