"""The native kernels under GCC's sanitizers, and without a warning of any compiler that is here."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from native_build import SOURCES, WARNINGS, build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="no g++ for x86-64 here"),
]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_threads_and_kernels_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """A program of its own, as Python is not built for them. ThreadSanitizer cannot follow a fork with threads."""
    program = str(tmp_path / "program")
    sources = [str(Path(__file__).with_name("native_sanitizers.cpp")), *map(str, sorted(SOURCES.glob("*.cpp")))]
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    subprocess.run(["g++", *flags, "-I", str(SOURCES), *sources, "-o", program], check=True)
    # ThreadSanitizer wants its memory where address randomisation may have put something
    words = ["setarch", "-R", program, "nofork"] if sanitizer == "thread" else [program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-4000:]


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_no_compiler_has_a_warning(compiler: str) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    assert build(*WARNINGS, compiler=compiler).exists()
