"""Validation of request bodies: strict base models, fields that are ignored or refused, and errors for clients.

pydantic would collect an error for every invalid element of a body. To bound that work, lists have a maximum length and
fail at the first error, and the number of names is checked before the names.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.errors import InvalidRequestError
from gateway.generate.history import unread
from gateway.http.json_text import LIMITS, JsonSize, RoundedNumber, TooMuchJson, check_numbers, load_json

_QUOTED = re.compile("'([^']{1,200})'")
_PART = re.compile(r"[.\[]")
BodyT = TypeVar("BodyT", bound=BaseModel)


def at_most(entries: int) -> BeforeValidator:
    """Limit the entries of a dict before validation: pydantic validates all entries before it checks their number."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise PydanticCustomError("too_long", "Input should have at most {limit} entries", {"limit": entries})
        return value

    return BeforeValidator(check)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict) and None in value.values():
        return {name: item for name, item in value.items() if item is not None}
    return value


class ClientObject(BaseModel):
    """An object with strict types that ignores unknown fields: clients return objects of any version of the API."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: Any) -> Any:
        return _without_nulls(value)


class StrictBody(ClientObject):
    """An object without unknown fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: Any) -> Any:
        """Bound the number of errors for unknown names by the number of fields."""
        value = _without_nulls(value)
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            name = next(name for name in value if name not in known)
            raise PydanticCustomError("unknown_name", "Unknown parameter", {"name": name})
        return value


class RefusedField(NamedTuple):
    """A refused field."""

    advice: str
    """The reason or the alternative, as a sentence."""
    defaults: tuple[Any, ...] = ()
    """Accepted values, which ask for the default behaviour."""


@dataclass(frozen=True, slots=True)
class Unhonoured:
    """Fields of an API that the body models do not have. Only those in `inert` are accepted and ignored."""

    inert: Collection[str]
    """Ignored fields, which do not affect the answer."""
    unsupported: Mapping[str, RefusedField]

    def strip(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body without these fields. Raises InvalidRequestError for an unsupported field."""
        kept = {}
        for name, value in body.items():
            if name in self.unsupported:
                advice, defaults = self.unsupported[name]
                if value is not None and value not in defaults:
                    message = f"'{name}' is not supported. {advice}"
                    raise InvalidRequestError(message, param=name, code="unsupported_parameter")
            elif name not in self.inert:
                kept[name] = value
        return kept


_TEXT_ONLY = "The server reads and writes text only."
_NO_BEAMS = "The server samples; use 'n' for several answers."
_SEPARATE = "Thoughts are always in a field of their own, 'reasoning'."
_BIAS = "Use 'logit_bias'."
_ROUTER = "The server runs one model itself and routes to no other; remove the field."
_MAX_TOKENS = "Use 'max_tokens'."
EXTRA_BODY = RefusedField("It is an argument of the Python client; send its fields beside 'model'.", ({},))
_GRAMMAR = "Use 'structured_outputs' with 'grammar'."
UNHONOURED = Unhonoured(
    frozenset(
        {
            "user",
            "verbosity",
            "metadata",
            "store",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "guided_decoding_backend",
            "prediction",
            "request_id",
            "rid",
            # residence and caches of other servers
            "cache_prompt",
            "id_slot",
            "keep_alive",
            "slot_id",
        }
    ),
    {
        "functions": RefusedField("Use 'tools'.", ([],)),
        "function_call": RefusedField("Use 'tool_choice'.", ("none",)),
        "modalities": RefusedField(_TEXT_ONLY, (["text"],)),
        "audio": RefusedField(_TEXT_ONLY),
        "web_search_options": RefusedField("The server searches nothing; offer a function in 'tools'."),
        "moderation": RefusedField("The server has no moderation model; ask the served model."),
        "suffix": RefusedField("The server only continues texts; put the whole text into 'prompt'.", ("",)),
        # extensions of other servers
        "chat_template_args": RefusedField("Use 'chat_template_kwargs'.", ({},)),
        "extra_body": EXTRA_BODY,
        "format": RefusedField("Use 'response_format'."),
        "max_new_tokens": RefusedField(_MAX_TOKENS),
        "max_output_tokens": RefusedField(_MAX_TOKENS),
        "mirostat": RefusedField("Use 'temperature', 'top_p' or 'min_p'.", (0,)),
        "models": RefusedField("Name one model as 'model'.", ([],)),
        "n_predict": RefusedField(_MAX_TOKENS),
        "num_ctx": RefusedField("The context is fixed at the start, by --max-model-len."),
        "num_predict": RefusedField(_MAX_TOKENS),
        "options": RefusedField("Send its fields beside 'model', such as 'temperature' and 'max_tokens'.", ({},)),
        "plugins": RefusedField(_ROUTER, ([],)),
        "provider": RefusedField(_ROUTER, ({},)),
        "repeat_penalty": RefusedField("Use 'repetition_penalty'.", (1,)),
        "route": RefusedField(_ROUTER),
        "stop_sequences": RefusedField("Use 'stop'.", ([],)),
        "transforms": RefusedField(_ROUTER, ([],)),
        "typical_p": RefusedField("Use 'top_p' or 'min_p'.", (1,)),
        "usage": RefusedField("Answers have 'usage'; streams with 'stream_options' and 'include_usage'.", ({},)),
        "allowed_token_ids": RefusedField("Use 'structured_outputs' with 'choice', or 'logit_bias'."),
        "bad_words": RefusedField(_BIAS, ([],)),
        "chat_template": RefusedField("The server has one template; start it with --chat-template."),
        "documents": RefusedField("Write the documents into a message.", ([],)),
        "early_stopping": RefusedField(_NO_BEAMS, (False,)),
        "ebnf": RefusedField(_GRAMMAR),
        "grammar": RefusedField(_GRAMMAR),
        "include_reasoning": RefusedField(_SEPARATE, (True,)),
        "json_schema": RefusedField("Use 'response_format' with type 'json_schema'."),
        "kv_transfer_params": RefusedField("The server computes all prompts itself."),
        "length_penalty": RefusedField(_NO_BEAMS, (1,)),
        "logits_processors": RefusedField(_BIAS, ([],)),
        "lora_path": RefusedField("Name the adapter as 'model'."),
        "mm_processor_kwargs": RefusedField(_TEXT_ONLY, ({},)),
        "no_stop_trim": RefusedField("Use 'include_stop_str_in_output'.", (False,)),
        "priority": RefusedField("Use 'service_tier'.", (0,)),
        "prompt_logprobs": RefusedField("Use 'echo' with 'logprobs' of POST /v1/completions."),
        "regex": RefusedField("Use 'structured_outputs' with 'regex'."),
        "return_hidden_states": RefusedField("Use POST /v1/embeddings.", (False,)),
        "return_tokens_as_token_ids": RefusedField("Use 'return_token_ids'.", (False,)),
        "separate_reasoning": RefusedField(_SEPARATE, (True,)),
        "spaces_between_special_tokens": RefusedField("The tokenizer alone places spaces.", (True,)),
        "stop_regex": RefusedField("Use 'stop', or 'structured_outputs' with 'regex'.", ([],)),
        "stream_reasoning": RefusedField(_SEPARATE, (True,)),
        "structural_tag": RefusedField("Use 'tools' with 'strict'."),
        "truncate_prompt_tokens": RefusedField("Shorten the prompt in the client; POST /tokenize counts its tokens."),
        "use_beam_search": RefusedField(_NO_BEAMS, (False,)),
        "vllm_xargs": RefusedField("The server has no extensions.", ({},)),
    },
)
"""For chat completions, completions and embeddings."""


@dataclass(frozen=True)
class JsonPost(Generic[BodyT]):
    """A path that accepts a JSON object by POST."""

    path: str
    body: type[BodyT]
    unhonoured: Unhonoured

    def parse(self, raw: bytes | bytearray) -> BodyT:
        """Parse and validate a body. Raises InvalidRequestError."""
        return self.check(parse_json(raw))

    def check(self, fields: dict[str, Any]) -> BodyT:
        """Validate the fields of a body. Raises InvalidRequestError."""
        return validate(self.body, self.unhonoured.strip(fields))


def parse_json(raw: bytes | bytearray, limits: JsonSize = LIMITS) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequestError `invalid_json`, or `too_many_values` before parsing."""
    try:
        body = load_json(raw, limits)
        check_numbers(raw, body)
    except TooMuchJson as error:
        raise InvalidRequestError(f"The request body has {error}.", code="too_many_values") from None
    except RoundedNumber as error:
        param = param_name(error.place)
        message = f"'{param}' cannot be enforced: {error}."
        raise InvalidRequestError(message, param=param, code="invalid_value") from None
    except orjson.JSONDecodeError as error:
        message = f"The request body is not valid JSON: {error.msg}."
        raise InvalidRequestError(message, code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    return body


_CONTENTS = frozenset(("content", "input", "system"))
"""Fields with the parts of a message."""


def validate(model: type[BodyT], body: dict[str, Any]) -> BodyT:
    """Validate a body. Raises InvalidRequestError with the name of the first invalid parameter, without its value."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise _refusal(min(details, key=lambda detail: detail["type"] == "missing"), body.get("model")) from None


def _refusal(detail: ErrorDetails, model: object) -> InvalidRequestError:
    kind, param = detail["type"], param_name(detail["loc"])
    if kind == "unknown_name":
        kind, param = "extra_forbidden", param_name((*detail["loc"], detail["ctx"]["name"]))
    if kind == "extra_forbidden":
        advice = " Use 'structured_outputs'." if param.startswith("guided_") else ""
        return InvalidRequestError(f"Unknown parameter: '{param}'.{advice}", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        return InvalidRequestError(message, param=param, code="missing_required_parameter")
    is_type = kind.endswith("_type") or kind in {"int_from_float", "union_tag_invalid"}
    said = _unread(detail, model) or detail["msg"]
    message = f"Invalid value for '{param}': {said}."
    return InvalidRequestError(message, param=param, code="invalid_type" if is_type else "invalid_value")


def _unread(detail: ErrorDetails, model: object) -> str:
    """Return that the server does not read a part of a message; empty for other errors."""
    given = detail["input"]
    kind = given.get("type") if isinstance(given, dict) else given
    what = unread(kind) if isinstance(kind, str) and _CONTENTS.intersection(detail["loc"]) else ""
    return what and f"this server runs the text part of {str(model)[:128]}; {what}"


def param_name(loc: Sequence[int | str]) -> str:
    """Return a parameter name such as `messages[0].content`, without union tags; long client names are truncated."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith("<"):
            name += f".{part[:64]}" if name else part[:64]
    return name


@contextmanager
def told_in(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameters in an InvalidRequestError to the client's names."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = None if error.param is None else rename(error.param, names)
        error.message = _QUOTED.sub(lambda match: f"'{rename(match[1], names)}'", error.message)
        raise


def rename(param: str, names: Mapping[str, str]) -> str:
    """Return the client's name of a parameter, or of its longest prefix that has a name."""
    if param in names:
        return names[param]
    ends = reversed([match.start() for match in _PART.finditer(param)])
    return next((names[param[:end]] for end in ends if param[:end] in names), param)
