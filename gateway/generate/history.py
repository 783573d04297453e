"""Texts in place of the parts of a conversation that a text model cannot read: pictures, files, and calls and results
of tools that other servers ran.

Agents send their whole history with every request, so a refused part would end the session for good. Only the user's
own last message keeps parts without a text; validation refuses them, and the user can act on it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_IMAGE = "[an image, which this model cannot see]"
_SOUND = "[a sound, which this model cannot hear]"
_FIXED = {
    "image": _IMAGE, "image_url": _IMAGE, "input_image": _IMAGE, "image_file": _IMAGE, "computer_screenshot": _IMAGE,
    "audio": _SOUND, "input_audio": _SOUND, "output_audio": _SOUND,
    "item_reference": "[an earlier item, which is not stored on this server]",
}  # fmt: skip
_FILES = ("document", "file", "input_file", "container_upload")
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_NOISE = frozenset({"type", "id", "call_id", "tool_use_id", "status", "signature", "cache_control", "citations"})
_MAX_DEPTH = 8
_MAX_WORD = 512
"""Maximum characters of a text without white space; longer ones are binary data or signatures."""
_MAX_KIND_CHARS = 64
_OMITTED = "..."


def unread(kind: str) -> str:
    """Return that parts of a type are not read; empty for parts with a text and for unknown ones."""
    kinds = {_IMAGE: "images are not read", _SOUND: "audio is not read"}
    return "files are not read" if kind in _FILES else kinds.get(_FIXED.get(kind, ""), "")


def note(part: Any, depth: int = 0) -> str:
    """Return the text of a part or item, or a short text in its place; its type may be unknown."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return _json(part)
    if depth > _MAX_DEPTH:
        return _OMITTED
    text = _text(part, depth)
    if text is not None:
        return text
    kind = str(part.get("type") or ("item_reference" if part.keys() == {"id"} else ""))[:_MAX_KIND_CHARS]
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _FILES:
        inner = part.get("file")
        names = (part.get("title"), part.get("filename"), inner.get("filename") if isinstance(inner, dict) else None)
        return (
            f"[the file{''.join(f' {name}' for name in names if isinstance(name, str))}, which this model cannot read]"
        )
    if kind == "tool_reference":
        return f"[the tool {part.get('tool_name')}]"
    shown = _cleaned(part, 0)
    if not kind:
        return _json(shown)
    if len(shown) == 1:
        (shown,) = shown.values()
    return f"[{kind}: {shown if isinstance(shown, str) else _json(shown)}]" if shown else f"[{kind}]"


def _text(part: Mapping[str, Any], depth: int = 0) -> str | None:
    """Return the text of a part that has no other content, else None."""
    match part:
        case {"type": kind, "text": str(text)} if kind in _TEXTS:
            return text
        case {"type": "refusal", "refusal": str(text)} | {"type": "compaction", "content": str(text)}:
            return text
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return _titled(part, text)
        case {"type": "document", "source": {"type": "content", "content": content}}:
            return _titled(part, joined(content, depth + 1))
        case {"type": "search_result", "content": content}:
            return _titled(part, joined(content, depth + 1))
    return None


def _titled(part: Mapping[str, Any], text: str) -> str:
    heads = [part.get(name) for name in ("title", "source", "context")]
    return "\n".join([*(head for head in heads if isinstance(head, str)), text])


def joined(content: Any, depth: int = 0) -> str:
    """Return a content of any form as text."""
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join([note(part, depth) for part in parts])


def _cleaned(value: Any, depth: int) -> Any:
    """Return a value without binary data, ids and empty fields."""
    if depth > _MAX_DEPTH:
        return _OMITTED
    if isinstance(value, str):
        return _OMITTED if len(value) > _MAX_WORD and len(value.split(None, 1)) == 1 else value
    if isinstance(value, list):
        return [_cleaned(each, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if depth and value.get("type") in _FIXED:
        return note(value)
    fields = {name: _cleaned(each, depth + 1) for name, each in value.items() if name not in _NOISE}
    return {
        name: each
        for name, each in fields.items()
        if each is not None and each not in ("", [], {}) and not name.startswith("encrypted_")
    }


def _json(value: Any) -> str:
    return orjson.dumps(_cleaned(value, 0) if isinstance(value, dict | list) else value).decode()


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a past call, which may be of any form, as a JSON object. A text that is no
    JSON, such as a cut one, becomes a field."""
    found = arguments
    for _ in range(2):  # a JSON text may hold a JSON text
        if isinstance(found, str):
            try:
                found = orjson.loads(found or "{}")
            except orjson.JSONDecodeError:
                break
    if found is None or found == []:
        found = {}
    try:
        return orjson.dumps(found if isinstance(found, dict) else {"arguments": arguments}).decode()
    except orjson.JSONEncodeError:  # nested too deeply
        return _json(found)


# --- conversations


def _own(items: Sequence[Any]) -> int:
    """Return the position of the user's own last message, which the model has not answered, or -1. Agents put pictures
    of their tools into a user message with or behind the results; such a message is not the user's own."""
    for at in reversed(range(len(items))):
        role = items[at].get("role") if isinstance(items[at], dict) else None
        if role not in ("system", "developer"):
            is_own = role == "user" and not _has_result(items[at]) and not (at and _has_result(items[at - 1]))
            return at if is_own else -1
    return -1


def _has_result(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    content = item.get("content")
    kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return item.get("role") in ("tool", "function") or "tool_result" in kinds or _ends(item, "_output")


def _ends(item: Mapping[str, Any], end: str) -> bool:
    kind = item.get("type")
    return isinstance(kind, str) and kind.endswith(end)


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _readable_parts(content: Any, own: bool, keep: Sequence[str] = ()) -> Any:
    """Return a content with text parts in place of parts of other types than `keep`; of the user's `own` parts only
    those that have a text."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind, text = (part.get("type"), _text(part)) if isinstance(part, dict) else (None, None)
        kept = kind in keep or (own and text is None)
        parts.append(part if kept else _text_part(note(part) if text is None else text))
    return parts


def readable_messages(messages: Any) -> Any:
    """Return the messages of a chat request with texts in place of what the model cannot read."""
    if not isinstance(messages, list):
        return messages
    own = _own(messages)
    return [_chat_message(each, own=at == own) if isinstance(each, dict) else each for at, each in enumerate(messages)]


def _chat_message(message: dict[str, Any], *, own: bool) -> dict[str, Any]:
    found = dict(message)
    if found.get("role") == "assistant":
        _read_answer(found)
    elif found.get("role") == "function":  # the older form of tools
        found |= {"role": "tool", "tool_call_id": str(found.get("name") or "")}
    if found.get("role") == "tool" and isinstance(found.get("content"), dict | int | float):
        found["content"] = _json(found["content"])
    if "content" in found:
        found["content"] = _readable_parts(found["content"], own)
    return found


def _read_answer(message: dict[str, Any]) -> None:
    """Convert thoughts among the parts, and calls of other types, of an assistant's message."""
    if isinstance(content := message.get("content"), list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        message["content"] = [part for part, kind in zip(content, kinds, strict=True) if kind not in _THOUGHTS]
        thoughts = [_thought(part) for part, kind in zip(content, kinds, strict=True) if kind in _THOUGHTS]
        if any(thoughts) and not (message.get("reasoning") or message.get("reasoning_content")):
            message["reasoning_content"] = "\n".join(filter(None, thoughts))
    calls, call = message.get("tool_calls"), message.get("function_call")
    if isinstance(call, dict) and not calls:  # the older form of tools
        calls = [{"id": call.get("name"), "function": call}]
    if isinstance(calls, list):
        message["tool_calls"] = [_chat_call(each) if isinstance(each, dict) else each for each in calls]


_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")


def _thought(part: Mapping[str, Any]) -> str:
    content = next((part[name] for name in ("thinking", "reasoning", "text") if part.get(name)), None)
    return joined(content)


def _chat_call(call: dict[str, Any]) -> dict[str, Any]:
    match call:
        case {"function": dict(function)}:
            name, arguments = function.get("name"), function.get("arguments")
        case {"custom": dict(custom)}:
            name, arguments = custom.get("name"), {"input": custom.get("input")}
        case _:
            name, arguments = call.get("type"), _cleaned(call, 0)
    text = arguments if isinstance(arguments, str) else arguments_text(arguments)
    return {"id": str(call.get("id") or ""), "function": {"name": str(name or ""), "arguments": text}}


_KEPT_BLOCKS = {"user": ("tool_result", "tool_use"), "assistant": ("thinking", "redacted_thinking", "tool_use")}


def readable_turns(messages: Any) -> Any:
    """Return the messages of /v1/messages with texts in place of blocks that the model cannot read."""
    if not isinstance(messages, list):
        return messages
    own = _own(messages)
    return [_turn(each, own=at == own) if isinstance(each, dict) else each for at, each in enumerate(messages)]


def _turn(message: dict[str, Any], *, own: bool) -> dict[str, Any]:
    content = message.get("content")
    if content is None and not own:
        return {**message, "content": ""}
    keep = _KEPT_BLOCKS.get(str(message.get("role")), ())
    parts = _readable_parts(content, own, keep)
    return {**message, "content": [_block(part) for part in parts] if isinstance(parts, list) else parts}


def _block(block: Any) -> Any:
    match block:
        case {"type": "tool_result"}:
            result = block.get("content")
            content = result if isinstance(result, str) else joined(result)
            return {**block, "tool_use_id": str(block.get("tool_use_id") or ""), "content": content}
        case {"type": "tool_use"}:
            given = block.get("input")
            use = given if isinstance(given, dict) else orjson.loads(arguments_text(given))
            return {**block, "id": str(block.get("id") or ""), "name": str(block.get("name") or ""), "input": use}
        case {"type": "thinking"} if not isinstance(block.get("thinking"), str):
            return {"type": "redacted_thinking"}
    return block


def readable_items(items: Any) -> Any:
    """Return the items of /v1/responses as messages, calls, outputs and reasoning.

    An `item_reference` is kept, and refused later, if it is the last item or names an item of this server: the client
    can send whole items instead. One of another server becomes a note."""
    if not isinstance(items, list):
        return items
    own = _own(items)
    return [
        _item(each, own=at == own)
        if isinstance(each, dict) and not (_is_reference(each) and (at + 1 == len(items) or _is_ours(each)))
        else each
        for at, each in enumerate(items)
    ]


def _is_reference(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _is_ours(item: Mapping[str, Any]) -> bool:
    return re.fullmatch("[a-z]+_[0-9a-f]{24}", str(item.get("id"))) is not None


def _item(item: dict[str, Any], *, own: bool) -> dict[str, Any]:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    call_id = item.get("call_id") or item.get("id") or ""
    if kind == "message":
        return {**item, "content": _readable_parts(item.get("content"), own)}
    if kind == "reasoning":
        content = item.get("content")
        thoughts = [_text_part(note(each)) for each in content] if isinstance(content, list) else None
        return {"type": "reasoning", "content": thoughts}
    if kind == "function_call":
        arguments = item.get("arguments")
        text = arguments if isinstance(arguments, str) else arguments_text(arguments)
        return {**item, "call_id": str(call_id), "name": str(item.get("name") or ""), "arguments": text}
    if _ends(item, "_output"):
        output = item.get("output", item.get("result"))
        text = note({**item, "type": kind}) if output is None else joined(output)
        return {"type": "function_call_output", "call_id": str(call_id), "output": text}
    if _ends(item, "_call") and isinstance(item.get("call_id"), str):
        name = str(item.get("name") or kind.removesuffix("_call"))
        fields = {each: value for each, value in item.items() if each not in ("name", "arguments", "namespace")}
        given = item.get("arguments") or _cleaned(fields, 0)
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments_text(given)}
    return {"type": "message", "role": "assistant", "content": note(item)}
