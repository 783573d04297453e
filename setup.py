"""The native CPU kernels: a plain shared library beside engine/execution/cpu/native/library.py, built where it can be.

Everything else about the package is in pyproject.toml. The library knows neither Python nor torch, so that a wheel of
it serves every Python of its platform; without a compiler, or on another processor, the package installs without it.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = "engine.execution.cpu.native"
SOURCES = Path("engine/execution/cpu/native/src")
FLAGS = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-g0"]


class BuildLibrary(build_ext):
    """Builds a shared library that no Python imports: its name has no version of one, and nothing is exported to it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / "libtidemill_cpu.so")

    def get_export_symbols(self, ext: Extension) -> list[str]:  # noqa: ARG002
        return []

    def run(self) -> None:
        super().run()
        if not all(Path(self.get_ext_fullpath(ext.name)).exists() for ext in self.extensions):
            print("tidemill: the native CPU kernels were not built, steps will run by torch", file=sys.stderr)


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
            extra_link_args=["-pthread", "-s"],
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=native_kernels(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
