"""The required form of an answer, as plain values that can be sent to another process.

`engine.structured` compiles a grammar, `engine.execution.masks` restricts the tokens of a row to it."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

MAX_GRAMMAR_BYTES = 256 * 1024

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text`: a JSON schema; a regular expression; a JSON list of the texts to choose from; a grammar as Lark or
    GBNF, whichever it looks like; a grammar as Lark.

    `whitespace` (json only): a regular expression of what may stand between the parts of the JSON; None: nothing, the
    answer is compact. `param`: the field of the request that errors name. `tenant`: the tenant that may use the
    compiled grammar, so that the time of a first answer does not tell which grammars other tenants use.
    """

    kind: GrammarKind
    text: str
    whitespace: str | None = None
    param: str = "response_format"
    tenant: str = ""

    def key(self) -> bytes:
        """Return a digest of everything but the name of the field."""
        parts = (self.tenant, self.kind, self.whitespace or "", str(self.whitespace is None), self.text)
        digest = blake2b(digest_size=16)
        for part in parts:
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()
