"""Work in a thread that is gone afterwards, and its OpenMP workers with it. Torch-free."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_passing_thread(work: Callable[[], T]) -> T:
    """The result of `work`; raises what it raises.

    Every thread that has run an operator on several cores keeps OpenMP workers of its own. With more of them than cores
    the workers sleep at each barrier instead of spinning: steps of the engine's thread would take 1.3 to 2 times as
    long as those that the profile was made of.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, name="tidemill-passing", daemon=True)  # a Ctrl-C does not wait for it
    thread.start()
    result = future.result()
    thread.join()
    return result
