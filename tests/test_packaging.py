"""The wheel: its contents, and that it works outside the checkout."""

import _ctypes
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.version import Version

from engine import __version__

ROOT = Path(__file__).resolve().parents[1]
KERNELS = Path("engine/execution/cpu/native/libtidemill_cpu.so")
slow = pytest.mark.slow  # building a wheel compiles the kernels
pytestmark = pytest.mark.timeout(900)


def build(folder: Path, compiler: str, *without: str) -> tuple[Path, str]:
    """Build a wheel from a copy of the sources in `folder`; return it and the output of the build."""
    skipped = shutil.ignore_patterns(".*", "*.so", "*.egg-info", *without)
    top = {str(ROOT): {"build", "dist", "tests", "docs"}}  # `engine/build` is a package
    shutil.copytree(ROOT, folder / "tree", ignore=lambda path, names: skipped(path, names) | top.get(path, set()))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), folder / "tree"]
    environment = {**os.environ, "CC": compiler, "CXX": compiler}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl")), done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels in it are compiled without most optimisations, which take a minute."""
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O1\n')
    compiler.chmod(0o755)
    return build(folder, str(compiler))[0]


def test_each_dependency_has_a_floor_that_is_no_newer_than_what_is_here() -> None:
    """`make floors` runs the tests with them."""
    done = subprocess.run([sys.executable, ROOT / "tools" / "floors.py"], capture_output=True, text=True, check=True)
    floors = dict(pinned.split("==") for pinned in done.stdout.split())
    assert len(floors) > 15 and "torch" not in floors
    for name, floor in floors.items():
        assert Version(metadata.version(name)) >= Version(floor), name


@slow
def test_wheel_holds_the_packages_and_the_demo_model(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"gateway", "engine", "predictor", "loadgen", "tidemill"}
    assert not [name for name in names if "fake" in name], "test doubles stay in tests/"
    assert not [name for name in names if "training" in name], "the wheel does not train"
    assert "engine/models/demo/weights/model.safetensors" in names
    assert "engine/models/demo/weights/tokenizer.json" in names
    assert {"gateway/web/static/index.html", "gateway/web/static/app.js"} <= set(names)


@slow
def test_the_wheel_holds_the_native_kernels_where_a_compiler_is(wheel: Path) -> None:
    """For every Python of the platform: they know of none."""
    if shutil.which("g++") and platform.machine() == "x86_64":
        assert str(KERNELS) in zipfile.ZipFile(wheel).namelist()
    assert "-py3-none-" in wheel.name
    assert wheel.name.startswith(f"tidemill-{__version__}-")


@slow
def test_without_a_compiler_the_wheel_is_built_and_says_what_it_lacks(tmp_path: Path) -> None:
    built, said = build(tmp_path, "/bin/false", "weights")
    assert "steps will run by torch" in said
    assert str(KERNELS) not in zipfile.ZipFile(built).namelist()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A tree of the kernels' sources, with a shared library in a wheel in dist/ that claims to be built from them."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("no native kernels here")
    tree = tmp_path / "sources"
    shutil.copytree(ROOT / KERNELS.parent / "src", tree / KERNELS.parent / "src")
    shutil.copy(ROOT / "setup.py", tree)
    (tree / "dist").mkdir()
    code = "import setuptools; setuptools.setup = lambda **_: None; import setup; print(setup.build_id())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
    pack(tree, Path(_ctypes.__file__).read_bytes() + bytes.fromhex(done.stdout.strip()))
    return tree


def pack(tree: Path, content: bytes) -> None:
    """Write a wheel that holds only a library."""
    with zipfile.ZipFile(tree / "dist" / "tidemill-0-py3-none-linux_x86_64.whl", "w") as wheel:
        wheel.writestr(str(KERNELS), content)


def build_kernels(tree: Path) -> str:
    """Run the step of `make serve` that builds the kernels, without a compiler; return its output."""
    environment = {"PATH": "", "CC": "/bin/false", "CXX": "/bin/false"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def test_kernels_of_a_wheel_of_the_same_sources_are_not_compiled(sources: Path) -> None:
    said = build_kernels(sources)
    assert "nothing to compile" in said and "build the CPU kernels" not in said
    assert (sources / KERNELS).read_bytes().startswith(b"\x7fELF")
    shutil.rmtree(sources / "dist")
    assert f"CPU kernels from {KERNELS}: nothing" in build_kernels(sources), "an install takes those of the tree"


def test_a_damaged_wheel_is_passed_over(sources: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(str(KERNELS), b"library" * 1000)
    content = packed.getvalue()
    index, data = content.index(b"PK\1\2"), len(str(KERNELS)) + 30
    damages = {0: b"junk", index + 8: b"\1", index + 10: b"\x63", data: b"\xff" * 8}  # encrypted, an unknown method
    for number, (at, damage) in enumerate(damages.items()):
        damaged = content[:at] + damage + content[at + len(damage) :]
        (sources / "dist" / f"tidemill-0-{number}.whl").write_bytes(damaged)
    (sources / "dist" / "tidemill-0-empty.whl").touch()
    said = build_kernels(sources)
    assert said.count("cannot be read") == len(damages) + 1 and "nothing to compile" in said, said


def test_kernels_of_other_sources_are_compiled(sources: Path) -> None:
    with (sources / KERNELS.parent / "src" / "abi.h").open("a") as header:
        header.write("// changed\n")
    said = build_kernels(sources)
    assert "build the CPU kernels, about" in said and "were not built" in said
    assert not (sources / KERNELS).exists()


def test_kernels_that_the_system_cannot_load_are_compiled(sources: Path) -> None:
    wheel = zipfile.ZipFile(next((sources / "dist").iterdir()))
    pack(sources, b"x" + wheel.read(str(KERNELS)))
    said = build_kernels(sources)
    assert "do not load" in said and "build the CPU kernels, about" in said
    assert not (sources / KERNELS).exists()


@slow
def test_an_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """A bare environment that sees this one's libraries but neither the checkout nor a compiler."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    libraries = next(p for p in sys.path if p.endswith("site-packages"))
    (tmp_path / "libs").mkdir()
    for entry in Path(libraries).iterdir():
        if "tidemill" not in entry.name:
            (tmp_path / "libs" / entry.name).symlink_to(entry)
    environment = {**os.environ, "PYTHONPATH": f"{site}:{tmp_path / 'libs'}", "PATH": ""}
    code = (
        "import gateway, engine, predictor, loadgen, engine.core, tidemill.cli, pathlib, sys;"
        "sys.exit(not str(pathlib.Path(engine.__file__)).startswith(sys.argv[1]))"
    )
    done = subprocess.run([python, "-c", code, str(site)], env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0
    if (site / KERNELS).exists():
        code = "from engine.execution.cpu.native.library import load; print(load().levels())"
        done = subprocess.run([python, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert "Level.AVX2" in done.stdout, done.stderr
    command = [python, "-m", "gateway", "serve", "--dry-run", "--port", "0"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tidemill-demo" in done.stdout
    (distribution,) = site.glob("*.dist-info")
    shutil.rmtree(distribution)  # as a source tree is, where nothing was installed
    check_serves(python, environment, tmp_path)


def check_serves(python: Path, environment: dict[str, str], folder: Path) -> None:
    """`serve` with nothing but the wheel answers a chat."""
    flags = ["--port", "0", "--device", "cpu", "--profile-seconds", "0", "--num-gpu-blocks-override", "100"]
    environment = {**environment, "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [python, "-m", "gateway", "serve", *flags]
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.decode())
            if found := re.search(r"listening on (http://\S+)", lines[-1]):
                break
        else:
            pytest.fail("".join(lines)[-2000:])
        question = {
            "model": "tidemill-demo",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json={**question, "temperature": 0}, timeout=60)
        assert answer.status_code == 200
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()
