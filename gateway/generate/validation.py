"""Validation of request bodies: strict base models, fields that are ignored or refused, and errors for clients.

pydantic would collect an error for every invalid element of a body. To bound that work, lists have a maximum length and
fail at the first error, and the number of names is checked before the names.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from engine.errors import InvalidRequestError
from gateway.http.json_text import TooMuchJson, load_json

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


@dataclass(frozen=True, slots=True)
class Unhonoured:
    """Fields of an API that the body models do not have. Only those in `inert` are accepted and ignored."""

    inert: Collection[str]
    """Ignored fields, which do not affect the answer."""
    unsupported: Mapping[str, tuple[Any, ...]]
    """Refused fields, with the values that are accepted because they ask for the default behaviour."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """Advice for the error message of a refused field."""

    def strip(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body without these fields. Raises InvalidRequestError for an unsupported field."""
        kept = {}
        for name, value in body.items():
            if name in self.unsupported:
                if value is not None and value not in self.unsupported[name]:
                    message = f"'{name}' is not supported. {self.hints.get(name, '')}".rstrip()
                    raise InvalidRequestError(message, param=name, code="unsupported_parameter")
            elif name not in self.inert:
                kept[name] = value
        return kept


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
        }
    ),
    {
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "moderation": (),
        "suffix": ("",),
        # extensions of vLLM and SGLang
        "bad_words": ([],),
        "documents": ([],),
        "early_stopping": (False,),
        "include_reasoning": (True,),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "mm_processor_kwargs": ({},),
        "no_stop_trim": (False,),
        "priority": (0,),
        "return_hidden_states": (False,),
        "return_tokens_as_token_ids": (False,),
        "separate_reasoning": (True,),
        "spaces_between_special_tokens": (True,),
        "stop_regex": ([],),
        "stream_reasoning": (True,),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
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


def parse_json(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequestError `invalid_json`, or `too_many_values` before parsing."""
    try:
        body = load_json(raw)
    except TooMuchJson as error:
        raise InvalidRequestError(f"The request body has {error}.", code="too_many_values") from None
    except orjson.JSONDecodeError:
        raise InvalidRequestError("The request body is not valid JSON.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    return body


def validate(model: type[BodyT], body: dict[str, Any]) -> BodyT:
    """Validate a body. Raises InvalidRequestError with the name of the first invalid parameter, without its value."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise _refusal(min(details, key=lambda detail: detail["type"] == "missing")) from None


def _refusal(detail: ErrorDetails) -> InvalidRequestError:
    kind, param = detail["type"], _param_name(detail["loc"])
    if kind == "unknown_name":
        kind, param = "extra_forbidden", _param_name((*detail["loc"], detail["ctx"]["name"]))
    if kind == "extra_forbidden":
        return InvalidRequestError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        return InvalidRequestError(message, param=param, code="missing_required_parameter")
    is_type = kind.endswith("_type") or kind in {"int_from_float", "union_tag_invalid"}
    message = f"Invalid value for '{param}': {detail['msg']}."
    return InvalidRequestError(message, param=param, code="invalid_type" if is_type else "invalid_value")


def _param_name(loc: tuple[int | str, ...]) -> str:
    """Return a parameter name such as `messages[0].content`, without union tags; long client names are truncated."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith("<"):
            name += f".{part[:64]}" if name else part[:64]
    return name
