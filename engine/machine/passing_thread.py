"""Run work in a temporary thread whose OpenMP workers end with it. Torch-free."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_passing_thread(work: Callable[[], T]) -> T:
    """Run `work` in a temporary thread; return its result or raise its error.

    Every thread that has run a parallel operator keeps its own OpenMP workers. If there are more workers than cores,
    they sleep at each barrier instead of spinning, and steps of the engine's thread take 1.3 to 2 times as long as in
    the profile.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, name="tidemill-passing", daemon=True)  # Ctrl-C does not wait for a daemon thread
    thread.start()
    result = future.result()
    thread.join()
    return result
