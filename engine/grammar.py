"""What an answer must look like, as plain values that can be sent to another process. Who enforces it:
`engine.structured.compiler` compiles a grammar, `engine.execution.masks` keeps the tokens of a row to it."""

from dataclasses import dataclass
from typing import Literal

MAX_GRAMMAR_BYTES = 256 * 1024

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text`: a JSON schema; a regular expression; a JSON list of the texts to choose from; a grammar as Lark or
    GBNF, whichever it looks like; a grammar as Lark.

    `whitespace` (json only): a regular expression of what may stand between the parts of the JSON; None: nothing, the
    answer is compact. `param`: the field of the request that errors name.
    """

    kind: GrammarKind
    text: str
    whitespace: str | None = None
    param: str = "response_format"
