"""The fields of a request body that can be large, read from the JSON schema of its pydantic model.

A new field is found without a change here: the tables below only say which values make a body valid.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fake_engine import MODEL
from pydantic import BaseModel

Schema = Mapping[str, Any]
Put = Callable[[Any], Any]

USER = {"role": "user", "content": "a"}
OBJECT = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}

BASES: Mapping[str, Mapping[str, Any]] = {
    "ChatCompletionRequest": {"model": MODEL, "messages": [USER]},
    "CompletionRequest": {"model": MODEL, "prompt": "a"},
    "EmbeddingRequest": {"model": MODEL, "input": "a"},
    "ResponsesRequest": {"model": MODEL, "input": "a"},
    "MessagesRequest": {"model": MODEL, "messages": [USER], "max_tokens": 4},
    "CountRequest": {"model": MODEL, "messages": [USER]},
    "ChatMessage": USER,
    "JsonSchema": {"name": "a", "schema": OBJECT},
    "FunctionCall": {"name": "f", "arguments": "{}"},
    "FunctionDefinition": {"name": "f"},
}
"""The smallest valid object of a model, where the required fields alone are not valid."""

COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "ChatCompletionRequest.top_logprobs": {"logprobs": True},
    "ChatCompletionRequest.stream_options": {"stream": True},
    "ChatCompletionRequest.tools": {"tool_choice": "required"},
    "ChatCompletionRequest.tool_choice": {"tools": [TOOL]},
    "ChatCompletionRequest.parallel_tool_calls": {"tools": [TOOL]},
    "CompletionRequest.stream_options": {"stream": True},
    "ResponsesRequest.tools": {"tool_choice": "required"},
    "ResponsesRequest.tool_choice": {"tools": [{"type": "function", "name": "f", "parameters": OBJECT}]},
    "MessagesRequest.tools": {"tool_choice": {"type": "any"}},
    "MessagesRequest.tool_choice": {"tools": [{"name": "f", "input_schema": OBJECT}]},
    "ChatMessage.tool_calls": {"role": "assistant"},
    "ChatMessage.reasoning": {"role": "assistant"},
    "ChatMessage.reasoning_content": {"role": "assistant"},
    "StructuredOutputs.whitespace_pattern": {"json_object": True},
    "ResponseFormat.json_schema": {"type": "json_schema"},
    "TextFormat.schema": {"type": "json_schema", "name": "a"},
    "TextFormat.name": {"type": "json_schema", "schema": OBJECT},
    "TextFormat.description": {"type": "json_schema", "schema": OBJECT, "name": "a"},
}
"""Fields that another field needs."""

TEXTS: Mapping[str, Callable[[str], str]] = {
    "arguments": lambda text: '{"a":"' + text.replace("\n", "\\n") + '"}',
    "json": lambda text: '{"type":"object","description":"' + text.replace("\n", "\\n") + '"}',
    "guided_json": lambda text: '{"type":"object","description":"' + text.replace("\n", "\\n") + '"}',
}
"""Functions that put a text into a field that holds JSON."""


@dataclass(frozen=True)
class Site:
    """One field. `put`: return a body with this value in the field. `most`: the largest valid size, None: no limit."""

    name: str
    kind: str
    schema: Schema
    put: Put
    most: int | None = None

    @property
    def field(self) -> str:
        return self.name.rpartition(".")[2].removesuffix("[]").removesuffix("{}")


@dataclass(frozen=True)
class Walker:
    """Walks the schema of one model."""

    root: Schema

    @classmethod
    def of(cls, model: type[BaseModel]) -> "Walker":
        return cls(model.model_json_schema(mode="validation"))

    def sites(self) -> list[Site]:
        return list(self.walk(self.root, self.root["title"], lambda value: value))

    def walk(self, schema: Schema, name: str, put: Put) -> Iterator[Site]:
        for member in self.members(schema):
            yield from self._walk_one(member, name, put)

    def members(self, schema: Schema) -> Iterator[Schema]:
        """Yield the schema without references, or the members of its union."""
        if "$ref" in schema:
            yield from self.members(self.root["$defs"][schema["$ref"].rpartition("/")[2]])
        elif "anyOf" in schema or "oneOf" in schema:
            for member in schema.get("anyOf") or schema["oneOf"]:
                yield from self.members(member)
        elif schema.get("type") != "null":
            yield schema

    def _walk_one(self, schema: Schema, name: str, put: Put) -> Iterator[Site]:
        kind = schema.get("type")
        if kind in ("integer", "number"):
            yield Site(name, "number", schema, put)
        elif {"enum", "const"} & set(schema):
            yield Site(name, "choice", schema, put)
        elif kind == "string":
            yield Site(name, "text", schema, put, schema.get("maxLength"))
        elif kind == "array":
            yield Site(name, "list", schema, put, schema.get("maxItems"))
            yield from self.walk(schema["items"], f"{name}[]", lambda value: put([value]))
        elif "properties" in schema:
            title = schema["title"]
            for field, each in schema["properties"].items():
                rest = {**self.least(schema), **COMPANIONS.get(f"{title}.{field}", {})}
                yield from self.walk(each, f"{name}.{field}", _into(put, rest, field))
        elif kind in ("object", None):
            yield Site(name, "map", schema, put, schema.get("maxProperties"))
            if isinstance(schema.get("additionalProperties"), Mapping):
                yield from self.walk(schema["additionalProperties"], f"{name}{{}}", lambda value: put({"1": value}))

    def least(self, schema: Schema, index: int = 0, pad: int = 1, full: bool = False) -> Any:
        """Return the smallest value of a schema, with texts of `pad` characters; `full`: with all fields."""
        schema = next(self.members(schema))
        if "const" in schema or "enum" in schema:
            return schema["const"] if "const" in schema else schema["enum"][0]
        kind = schema.get("type")
        if kind == "string":
            return "a" * min(pad, schema.get("maxLength", pad))
        if kind in ("integer", "number"):
            return schema.get("minimum", 1)
        if kind == "boolean":
            return False
        if kind == "array":
            return [self.least(schema["items"], index, pad)] * (1 if full else schema.get("minItems", 1))
        if "properties" not in schema:
            return OBJECT if kind == "object" else None
        return self._least_object(schema, index, pad, full)

    def _least_object(self, schema: Schema, index: int, pad: int, full: bool) -> dict[str, Any]:
        fields = schema["properties"]
        wanted = fields if full else schema.get("required", ())
        found = {name: self.least(fields[name], index, pad, full) for name in wanted}
        base = BASES.get(schema["title"], {})
        found |= {name: "a" * pad if value == "a" else value for name, value in base.items()}
        if "name" in found:
            found["name"] = f"f{index}"
        if "arguments" in found:
            found["arguments"] = "{}"
        return found

    def items(self, schema: Schema) -> Iterator[tuple[str, Callable[[int, int], Any]]]:
        """Yield functions that make item `index` of a list with texts of `pad` characters, each with a name.

        There is a function for each member of a union and each value of an enumeration, with and without all fields."""
        for number, member in enumerate(self.members(schema["items"])):
            title = member.get("title", member.get("type", number))
            fields = member.get("properties", {})
            enums = [{name: value} for name, each in fields.items() for value in _values(next(self.members(each), {}))]
            for full in (False, True) if len(fields) > len(member.get("required", ())) else (False,):
                for chosen in enums or [{}]:
                    yield f"{title}{'+' * full}{chosen or ''}", self._item(member, full, chosen)

    def _item(self, schema: Schema, full: bool, fields: Mapping[str, Any]) -> Callable[[int, int], Any]:
        def make(index: int, pad: int) -> Any:
            least = self.least(schema, index, pad, full)
            return {**least, **fields} if fields else least

        return make


def _into(put: Put, rest: Mapping[str, Any], field: str) -> Put:
    return lambda value: put({**rest, field: value})


def _values(schema: Schema) -> list[Any]:
    values = schema.get("enum", [])
    return list(values) if len(values) > 1 else []


def grown_schemas(n: int) -> dict[str, dict[str, Any]]:
    """Return JSON schemas of size n by name. `everything` has many large parts, to show copies of one per other."""
    texts = {f"p{i}": {"type": "string"} for i in range(n)}
    definitions = {f"d{i}": {"type": "string"} for i in range(n)}
    long = "x" * 16 * n
    return {
        "required": {"type": "object", "properties": texts, "required": list(texts)},
        "enum": {"type": "object", "properties": {"a": {"enum": list(texts)}}},
        "any of": {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "maxLength": 9}] * n}}},
        "references": {
            "type": "object",
            "$defs": definitions,
            "properties": {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(n)},
        },
        "everything": {
            "type": "object",
            "description": long,
            "$defs": {**definitions, "long": {"description": long}},
            "properties": {**texts, "e": {"enum": list(texts)}, "r": {"$ref": "#/$defs/d0"}},
            "required": list(texts),
        },
    }


ATOMS = ("a", "\n", "<|im_start|>")
"""Texts that long texts repeat."""


@dataclass(frozen=True)
class Growth:
    """A value that grows. `make(n, pad)`: the value of size n, with texts of `pad` characters in its parts. `lines`,
    `cpu`: the smallest size for each measure."""

    name: str
    make: Callable[[int, int], Any]
    lines: int
    cpu: int
    pad: int = 1


def growths(site: Site, walker: Walker) -> Iterator[Growth]:
    """Yield all ways to make the value of a field large."""
    most = 10**9 if site.most is None else site.most
    if site.kind == "choice":
        yield Growth("text", lambda n, _: "a" * n, 100, 2000)
    elif site.kind == "text":
        shape = TEXTS.get(site.field, str)
        for atom in ATOMS:
            text = partial(_repeated, atom, shape)
            yield Growth(repr(atom), text, min(100, most // 8), min(2000, most // 4))
    elif site.kind == "list":
        for name, item in walker.items(site.schema):
            make = partial(_listed, item)
            yield Growth(name, make, min(16, most // 8), min(500, most // 4), 1000)
    elif site.kind == "map" and isinstance(site.schema.get("additionalProperties"), Mapping):
        value = walker.least(site.schema["additionalProperties"])
        entries = partial(_entries, value)
        yield Growth("entries", entries, min(16, most // 8), min(1000, most // 4))
    elif site.kind == "map":
        for name in grown_schemas(1):
            yield Growth(name, lambda n, _, name=name: grown_schemas(n)[name], 16, 400)


def _listed(item: Callable[[int, int], Any], n: int, pad: int) -> list[Any]:
    return [item(index, pad) for index in range(n)]


def _repeated(atom: str, shape: Callable[[str], str], n: int, _: int) -> str:
    return shape((atom * n)[:n])


def _entries(value: Any, n: int, _: int) -> dict[str, Any]:
    return {str(index): value for index in range(n)}
