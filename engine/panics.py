"""Panics of native libraries as errors. The core calls no native library and does not import this module."""

from asyncio import CancelledError


class LibraryPanicError(Exception):
    """A native library panicked. The message names the type only, because a panic's own text may quote a prompt."""


CONTROL = (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError)
"""Exceptions that end a task or the process; every other BaseException is an error."""


def as_error(raised: BaseException) -> Exception:
    """Return what a handler of errors must handle: an Exception itself, or the panic of a native library as one.

    Use it in `except BaseException as raised`. pyo3's PanicException, which tokenizers, llguidance, orjson, safetensors
    and obstore raise, is a BaseException. Re-raises `CONTROL`, also within an exception group.
    """
    if isinstance(raised, Exception):
        return raised
    held = raised.subgroup(CONTROL) if isinstance(raised, BaseExceptionGroup) else raised
    if isinstance(held, (*CONTROL, BaseExceptionGroup)):
        raise raised
    while isinstance(raised, BaseExceptionGroup):
        raised = raised.exceptions[0]
    if isinstance(raised, Exception):
        return raised
    error = LibraryPanicError(f"a native library panicked ({type(raised).__name__})")
    return error.with_traceback(raised.__traceback__)
