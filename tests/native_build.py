"""Build the native kernels from the checkout's sources, once per version of the sources.

The tests of kernels never run a library that an install of earlier sources left behind.
"""

import fcntl
import hashlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest
from support.fuzz import FULL

from engine.execution.cpu.native import LIBRARY
from engine.execution.cpu.native.library import Level, Library, Team
from engine.execution.cpu.native.linear import Native

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "engine" / "execution" / "cpu" / "native" / "src"
FLAGS = ("-std=c++17", "-O3", "-fvisibility=hidden", "-fPIC", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror")


def build(*extra: str, compiler: str = "g++") -> Path:
    """The library compiled with more flags than the usual ones, from the folder of builds if it is there."""
    files = sorted(SOURCES.iterdir())
    sources = [path for path in files if path.suffix == ".cpp"]
    digest = hashlib.sha256("\0".join((compiler, *FLAGS, *extra)).encode())
    for path in files:
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "native-tests" / digest.hexdigest()[:16]
    library = folder / "libtidemill_cpu.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(partial(_compile, compiler, folder, extra), sources))
            _run(compiler, *FLAGS, *extra, "-shared", "-o", str(folder / "new.so"), *objects)
            (folder / "new.so").rename(library)
    return library


def _compile(compiler: str, folder: Path, extra: tuple[str, ...], source: Path) -> str:
    result = str(folder / source.with_suffix(".o").name)
    _run(compiler, *FLAGS, *extra, "-c", str(source), "-o", result)
    return result


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def library_file() -> Path:
    """The installed library where it is newer than its sources, as make decides: a build takes 30 s of CPU time."""
    inputs = [*SOURCES.iterdir(), ROOT / "setup.py"]
    is_current = LIBRARY.exists() and LIBRARY.stat().st_mtime > max(path.stat().st_mtime for path in inputs)
    return LIBRARY if is_current else build()


@cache
def native_library() -> Library:
    """Return the library of the given sources. Skip without a compiler or a processor for it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    library = Library(library_file())
    if not library.levels():
        pytest.skip("this processor has none of the levels")
    return library


@cache
def native(threads: int = 1) -> Native:
    """The kernels of the highest level up to AVX-512, run by a team of so many threads."""
    library = native_library()
    return Native(library, min(max(library.levels()), Level.AVX512), Team(library, threads))


@cache
def library_of(level: Level) -> Library:
    """A library that runs this level: where the processor lacks it, one that emulates its instructions."""
    library = native_library()
    return library if level in library.levels() else emulating_library()


@cache
def emulating_library() -> Library:
    """Return a library with all levels, emulated in AVX-512, and that in AVX2, as far as the processor goes.

    Its build takes a minute of processor time: tests skip here by default.
    """
    if not FULL:
        pytest.skip("instructions of other processors: make test-all")
    wide = Level.AVX512 in native_library().levels()
    return Library(build("-DTIDE_EMULATE", *(() if wide else ("-DTIDE_EMULATE_WIDE", "-Wno-psabi", "-O1"))))
