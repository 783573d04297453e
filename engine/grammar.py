"""The required form of an answer, as a value that can be sent to another process.

`engine.structured` compiles a grammar; `engine.execution.masks` applies it to the logits.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

MAX_GRAMMAR_BYTES = 256 * 1024

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar of a request."""

    kind: GrammarKind
    text: str
    """By kind: a JSON schema; a regular expression; a JSON list of choices; Lark or GBNF, detected; Lark."""
    whitespace: str | None = None
    """Kind `json` only: a regular expression for whitespace between tokens; None: compact JSON."""
    param: str = "response_format"
    """The request field that errors name."""
    tenant: str = ""
    """The tenant that may use the compiled grammar. Sharing it would reveal, by the time of a first answer, which
    grammars other tenants use."""

    def key(self) -> bytes:
        """Return a digest of all fields but `param`, 16 bytes."""
        parts = (self.tenant, self.kind, self.whitespace or "", str(self.whitespace is None), self.text)
        digest = blake2b(digest_size=16)
        for part in parts:
            data = part.encode(errors="surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()
