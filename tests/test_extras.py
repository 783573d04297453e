"""Messages name the command that installs a missing library for the running interpreter."""

import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from engine.machine import extras
from engine.machine.extras import ROOT, install_command

EXTRAS = ("gpu", "loadgen", "files", "cluster", "ray", "otel")


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_of_a_checkout_and_of_a_wheel(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pip", "install"]
    assert shlex.split(install_command(extra)) == [*command, "--editable", f"{ROOT}[{extra}]"]
    wanted = shlex.split(install_command(extra, tmp_path))
    assert wanted[:4] == command and wanted[4:] and all(";" not in each for each in wanted)
    assert {each for each in metadata.requires("tidemill") or () if f'"{extra}"' in each} == {
        f'{each}; extra == "{extra}"' for each in wanted[4:]
    }
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda _: None)
    assert install_command(extra).startswith(f"uv pip install --python {sys.executable} ")


@pytest.mark.parametrize("command", ["simulate", "worth"])
def test_simulations_need_no_extra(command: str) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('aiohttp', 'pyarrow', 'obstore', 'psycopg', 'torch')))\n"
        f"from tidemill import cli; sys.exit(cli.main(['{command}', '--help']))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and f"tidemill {command}" in done.stdout, done.stderr


def test_every_message_uses_the_command() -> None:
    for folder in ("engine", "gateway", "loadgen", "predictor", "tidemill"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "pip install" not in path.read_text() or path.name == "extras.py", path
