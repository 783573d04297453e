"""Stores the learned load and the budgets found, beside the latency profile, for the next server.

One bounded JSON file, written atomically. A damaged file or one of another version is ignored with a log line.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from predictor.budget_table import BudgetTable
from predictor.load import LoadModel
from predictor.profile import ProfileKey, write_atomically

SCHEMA = 1
MAX_BYTES = 4 * 2**20


class LoadStore:
    """The file for a profile's `key` in `folder`.

    `promise`: text that identifies everything budgets depend on besides the load.
    """

    def __init__(self, folder: Path, key: ProfileKey, promise: str) -> None:
        self.path = folder / f"{key.filename().removesuffix('.json')}.load.json"
        self._promise = promise

    def read(self, start: float, say: Callable[[str], None]) -> tuple[LoadModel, BudgetTable]:
        """Return the load and the budgets known at `start` (calendar seconds); both are empty without a readable file.

        Budgets for another SLO or configuration are dropped.
        """
        try:
            if not self.path.exists():
                return LoadModel(start), BudgetTable()
            if self.path.stat().st_size > MAX_BYTES:
                raise ValueError("it is far too large")
            document = json.loads(self.path.read_bytes())
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r:.20}")
            load = LoadModel.from_document(document["load"], start)
            same = document["promise"] == self._promise
            return load, BudgetTable.from_document(document["budgets"]) if same else BudgetTable()
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:100] or type(error).__name__
            say(f"what was learned of the load in {self.path} cannot be used ({reason}); learning anew")
            return LoadModel(start), BudgetTable()

    def encode(self, load: LoadModel, budgets: BudgetTable) -> bytes:
        """Return the content of the file."""
        document: dict[str, Any] = {"schema": SCHEMA, "promise": self._promise}
        document |= {"load": load.to_document(), "budgets": budgets.to_document()}
        return json.dumps(document, allow_nan=False).encode()

    def write(self, content: bytes) -> None:
        """Write the file atomically. Raises OSError if the folder is not writable."""
        write_atomically(self.path, content)
