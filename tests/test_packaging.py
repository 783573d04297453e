"""The wheel: what is in it, and that it works outside the checkout."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(out.glob("*.whl"))


def test_wheel_holds_the_packages_and_the_demo_model(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"gateway", "engine", "predictor", "loadgen"}
    assert "engine/models/demo/weights/model.safetensors" in names
    assert "engine/models/demo/weights/tokenizer.json" in names


def test_an_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """A bare environment that sees this one's libraries but not the checkout."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    libraries = next(p for p in sys.path if p.endswith("site-packages"))
    (tmp_path / "libs").mkdir()
    for entry in Path(libraries).iterdir():
        if "tidemill" not in entry.name:
            (tmp_path / "libs" / entry.name).symlink_to(entry)
    environment = {**os.environ, "PYTHONPATH": f"{site}:{tmp_path / 'libs'}"}
    code = (
        "import gateway, engine, predictor, loadgen, engine.core, gateway.cli, pathlib, sys;"
        "sys.exit(not str(pathlib.Path(engine.__file__)).startswith(sys.argv[1]))"
    )
    done = subprocess.run([python, "-c", code, str(site)], env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0
    command = [python, "-m", "gateway", "doctor"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tidemill-demo" in done.stdout
