"""The form of an answer, as values that can be sent to another process: a grammar, a thinking budget, or a pooling.

`engine.structured` compiles a grammar; `engine.execution.masks` applies it to the logits. A pooling asks for results of
a prompt's hidden states: its embedding, as configured by the checkpoint, or the log-probabilities of its tokens. The
module does not import torch.
"""

import enum
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

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


class Pooling(enum.Enum):
    """Result from the last hidden states, after the final norm: the last token's state, their mean, or scores.

    SCORES is a table with a row per prompt token: its log-probability, the n highest log-probabilities at its position,
    and the ids of these n tokens, where n is `SamplingParams.logprobs`. The first row is 0.
    """

    LAST = "last"
    MEAN = "mean"
    SCORES = "scores"


class EmbeddingSpec(NamedTuple):
    """Form of a model's embeddings."""

    pooling: Pooling | None  # None: unsupported; `origin` names the reason
    size: int  # numbers in a vector
    normalizes: bool  # vectors have length 1
    origin: str  # source of the settings, for the log

    def __str__(self) -> str:
        if self.pooling is None:
            return f"no embeddings: {self.origin}"
        length = "normalized" if self.normalizes else "not normalized"
        return f"embeddings: {self.pooling.value} token pooling, {length}, {self.size} numbers ({self.origin})"


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Tokens that begin and end a thought, as the tokenizer encodes the marks alone."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit of thought tokens in an answer, marks not counted; after it, only the closing mark may follow.

    `begun`: the prompt ends within a thought.
    """

    tokens: int
    marks: ThoughtMarks
    begun: bool = False
