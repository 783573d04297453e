"""Batch jobs and offline inference from Python: `from tidemill import Batch, LLM`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.batch import Batch, BatchResult
    from tidemill.llm import LLM

__all__ = ["LLM", "Batch", "BatchResult"]
_HOMES = {"Batch": "tidemill.batch", "BatchResult": "tidemill.batch", "LLM": "tidemill.llm"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)  # LLM imports the whole server
