"""How one vector is made of the hidden states of a text, as its checkpoint says it. Torch-free."""

import enum
import json
from pathlib import Path
from typing import Any, NamedTuple


class Pooling(enum.Enum):
    """Of the model's last hidden states, behind its final norm: the last token's, or their mean."""

    LAST = "last"
    MEAN = "mean"


class EmbeddingSpec(NamedTuple):
    """What a model makes of a text. `size`: numbers in a vector; `normalizes`: its length is 1; `origin`: who says so,
    for the log. `pooling` None: in a way that is not supported, which `origin` names."""

    pooling: Pooling | None
    size: int
    normalizes: bool
    origin: str

    def __str__(self) -> str:
        """A line for the log."""
        if self.pooling is None:
            return f"no embeddings: {self.origin}"
        length = "of length 1" if self.normalizes else "as they come"
        return f"embeddings: {self.pooling.value} token pooling, {length}, {self.size} numbers ({self.origin})"


_MODES = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}


def read_embedding_spec(folder: Path, hidden_size: int) -> EmbeddingSpec:
    """What the modules of sentence-transformers beside a checkpoint say; without them the last token's, normalized."""
    config = _read(folder / "1_Pooling" / "config.json")
    if not isinstance(config, dict):
        return EmbeddingSpec(Pooling.LAST, hidden_size, True, "there is no 1_Pooling/config.json")
    modules = _read(folder / "modules.json")
    names = [str(each.get("type", "")) for each in modules if isinstance(each, dict)] if modules else []
    kinds = [name.rpartition(".")[2] for name in names]
    asked = [name for name, value in config.items() if name.startswith("pooling_mode") and value is True]
    unknown = [*(name for name in asked if name not in _MODES), *(kind for kind in kinds if kind == "Dense")]
    if len(asked) != 1 or unknown:
        why = f"1_Pooling/config.json: {', '.join(unknown or asked) or 'no pooling'} is not supported"
        return EmbeddingSpec(None, hidden_size, False, why)
    normalizes = "Normalize" in kinds or not kinds
    return EmbeddingSpec(_MODES[asked[0]], hidden_size, normalizes, "1_Pooling/config.json")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
