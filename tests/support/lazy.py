"""Client SDKs that load at their first use in a test: openai alone takes a second at collection.

A module that names a class of an SDK in an annotation needs `from __future__ import annotations`.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """Import the module of this name when one of its public attributes is first used; pytest reads private ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    import anthropic
    import openai
else:
    anthropic, openai = LazyModule("anthropic"), LazyModule("openai")

__all__ = ["anthropic", "openai"]
