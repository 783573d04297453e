"""Batch jobs and offline inference from Python: `from tidemill import Batch, LLM`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.batch import Batch, BatchResult
    from tidemill.llm import LLM

__all__ = ["LLM", "Batch", "BatchResult"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tidemill.llm import LLM  # it imports the whole server

        return LLM
    if name in __all__:
        from tidemill import batch

        return getattr(batch, name)
    raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
