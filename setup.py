"""The native CPU kernels: a plain shared library beside engine/execution/cpu/native/library.py, built where it can be.

Everything else about the package is in pyproject.toml. The library knows neither Python nor torch and chooses its
instructions at run time, so that one wheel serves every Python and every x86-64 processor of its platform. A library of
the same sources in the tree or in a wheel in dist/ is taken instead of a build. Without a compiler, or on another
processor, the package installs without it.
"""

import ctypes
import hashlib
import platform
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = "engine.execution.cpu.native"
LIBRARY = Path("engine/execution/cpu/native/libtidemill_cpu.so")
SOURCES = LIBRARY.parent / "src"
FLAGS = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-g0", "-march=x86-64", "-mtune=generic"]
"""Instructions beyond those of every x86-64 processor are enabled in the sources, for each level."""


def say(text: str) -> None:
    print(f"tidemill: {text}", file=sys.stderr, flush=True)


def build_id() -> str:
    """Return the hash of sources and flags, which the linker writes into the library (.note.gnu.build-id)."""
    digest = hashlib.sha1(" ".join(FLAGS).encode(), usedforsecurity=False)
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def built_libraries() -> Iterator[tuple[Path, bytes]]:
    """Yield the libraries of the same sources: the one in the tree, then those of wheels in dist/."""
    for path in (LIBRARY, *sorted(Path("dist").glob("tidemill-*.whl"))):
        try:
            library = path.read_bytes() if path == LIBRARY else zipfile.ZipFile(path).read(str(LIBRARY))
        except FileNotFoundError:
            continue
        except Exception as error:  # a damaged file raises errors of zipfile, zlib and struct
            say(f"the CPU kernels of {path} cannot be read: {error}")
            continue
        if bytes.fromhex(build_id()) in library:
            yield path, library


class BuildLibrary(build_ext):
    """Builds a shared library that no Python imports: its name has no version of one, and nothing is exported to it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / LIBRARY.name)

    def get_export_symbols(self, ext: Extension) -> list[str]:  # noqa: ARG002
        return []

    def run(self) -> None:
        super().run()
        if not all(Path(self.get_ext_fullpath(ext.name)).exists() for ext in self.extensions):
            say("the native CPU kernels were not built, steps will run by torch")

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        for path, library in () if self.force else built_libraries():
            target.unlink(missing_ok=True)  # a running server may have it mapped
            target.write_bytes(library)
            try:
                ctypes.CDLL(str(target.resolve()))
            except OSError as error:  # built on a newer system
                say(f"the CPU kernels of {path} do not load: {error}")
                target.unlink()
            else:
                say(f"CPU kernels from {path}: nothing to compile")
                return
        say("build the CPU kernels, about 30 s")
        self.force = True  # also where only the flags have changed
        super().build_extension(ext)


class PlatformWheel(bdist_wheel):
    """Tagged with the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        _python, _abi, system = super().get_tag()
        return "py3", "none", system


def native_kernels() -> list[Extension]:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return []
    return [
        Extension(
            f"{PACKAGE}.kernels",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread", "-s", f"-Wl,--build-id=0x{build_id()}"],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=native_kernels(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
