"""End tokens of a checkpoint: those of its configs and the tokenizer's `eos_token`; torch-free."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from engine.models.spec import ModelShape

Shape = TypeVar("Shape", bound=ModelShape)


def with_tokenizer_end(shape: Shape, folder: Path) -> Shape:
    """Return the shape with the tokenizer's end token, which fine-tuned models may have in the tokenizer only."""
    found = tokenizer_end(folder)
    if found is None or found[1] in shape.eos_token_ids or not 0 <= found[1] < shape.vocab_size:
        return shape
    text, token = found
    others = ", ".join(map(str, sorted(shape.eos_token_ids))) or "none"
    note = f"answers also end at {text} ({token}), the tokenizer's eos_token; the end tokens of the configs: {others}"
    return replace(shape, eos_token_ids=shape.eos_token_ids | {token}, notes=(*shape.notes, note))


def tokenizer_end(folder: Path) -> tuple[str, int] | None:
    """Return text and id of the tokenizer's `eos_token`; None without a tokenizer, or one that names no such token."""
    config = _read(folder / "tokenizer_config.json")
    text = _text(config.get("eos_token")) or _text(_read(folder / "special_tokens_map.json").get("eos_token"))
    if not text:
        return None
    for token, each in _mapping(config.get("added_tokens_decoder")).items():
        if _text(each) == text and str(token).isdigit():
            return text, int(token)
    tokenizer = _read(folder / "tokenizer.json")
    for each in tokenizer.get("added_tokens") or ():
        if _text(each) == text and isinstance(each.get("id"), int):
            return text, int(each["id"])
    token_id = _mapping(_mapping(tokenizer.get("model")).get("vocab")).get(text)
    return (text, token_id) if isinstance(token_id, int) else None


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing or broken, which loading the tokenizer reports."""
    with suppress(OSError, ValueError):
        return dict(_mapping(json.loads(path.read_text(encoding="utf-8"))))
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(token: Any) -> str:
    """Return the text of a token, which is written as a string or as an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
