"""Clients of clients.toml: an environment for each, and the run of its program against the servers."""

import asyncio
import hashlib
import json
import os
import shutil
import sys
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
CACHE = Path(os.environ.get("TIDEMILL_CLIENTS") or Path.home() / ".cache" / "tidemill-clients")
"""The folder of the environments; delete it to install the newest clients."""


@dataclass(frozen=True, slots=True)
class Client:
    """A table of clients.toml."""

    name: str
    program: str
    packages: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Programs that must be on the PATH."""
    installed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A line that a program printed: the tested use, and `passed`, `refused: REASON` or `failed: REASON`."""

    what: str
    result: str


def load_clients() -> dict[str, Client]:
    tables = tomllib.loads((HERE / "clients.toml").read_text())
    lists = {"packages", "npm", "needs"}
    return {
        name: Client(name, **{key: tuple(value) if key in lists else value for key, value in table.items()})
        for name, table in tables.items()
    }


def installed_command(client: Client) -> list[str | Path]:
    """Return the command that runs the client's program in the environment of the tests."""
    return [sys.executable, PROGRAMS / client.program]


async def command(client: Client) -> list[str | Path]:
    """Return the command that runs the client's program in its own environment, which the first use installs."""
    packages = client.npm or client.packages
    if not packages:
        return installed_command(client)
    digest = hashlib.sha256("\n".join((sys.version, *packages)).encode()).hexdigest()[:12]
    folder = CACHE / f"{client.name}-{digest}"
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if client.npm:
            await _output("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *packages)
        else:
            await asyncio.to_thread(venv.create, folder, with_pip=True)
            await _output(python, "-m", "pip", "install", "--quiet", *packages)
        done.touch()
    if not client.npm:
        return [python, PROGRAMS / client.program]
    for program in PROGRAMS.glob("*.mjs"):  # Node looks for packages beside the program
        shutil.copy(program, folder)
    return ["node", folder / client.program]


async def run_program(words: list[str | Path], servers: dict[str, str], folder: Path) -> tuple[str, list[Step]]:
    """Run a client's program in `folder`; return the versions that it printed and its steps.

    `servers`: environment variables with the addresses. Raises AssertionError when the program ends early.
    """
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(folder)}
    # programs import `steps` from their own folder, which PYTHONSAFEPATH of an earlier test hides
    dropped = ("OPENAI_", "ANTHROPIC_", "CLAUDE", "PYTHONSAFEPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    text = await _output(*words, environment=kept | offline | servers, folder=folder)
    print(text)  # tracebacks of failed steps
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"client step":')]
    head, *steps = (line["client step"] for line in lines)
    assert steps and steps[-1] == "end", f"the program ended early:\n{text[-4000:]}"
    return head, [Step(*step) for step in steps[:-1]]


async def _output(*words: str | Path, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    process = await asyncio.create_subprocess_exec(
        *words, env=environment, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    assert process.returncode == 0, f"{words}: exit {process.returncode}\n{text[-4000:]}"
    return text
