"""`tidemill completions`: what bash, zsh and fish offer, asked of the shells themselves where they are installed."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway import cli
from gateway.commands.shell_completion import SHELLS, script

CASES: list[tuple[list[str], set[str] | None]] = [
    (["tidemill", "ser"], {"serve"}),
    (["tidemill", "batch", ""], {"submit", "list", "watch", "cancel", "results"}),
    (["tidemill", "batch", "submit", "--w"], {"--window", "--watch"}),
    (["tidemill", "serve", "--devi"], {"--device"}),
    (["tidemill", "serve", "--device", ""], {"auto", "cpu", "cuda"}),
    (["tidemill", "serve", "--port", "80", "--log-level", "w"], {"warning"}),
    (["tidemill", "serve", "--no-enable"], {"--no-enable-prefix-caching"}),
    (["tidemill", "completions", "z"], {"zsh"}),
    (["tidemill", "batch", "submit", ""], None),  # a file
    (["tidemill", "serve", "--port", ""], None),
]
"""Words on the line, the last one being completed, and what is offered; None: files, if anything."""

ZSH = """
_describe() { local each; for each in "${(@P)2}"; do print -r -- "${${each//\\\\:/;}%%:*}"; done }
compadd() { shift; print -rl -- "$@" }
_files() { }
compdef() { }
source SCRIPT
words=(WORDS)
CURRENT=$#words
_tidemill
"""


def asked_of(shell: str, file: Path, words: list[str]) -> set[str]:
    """What the shell offers for the last word."""
    typed = " ".join(map(shlex.quote, words))
    if shell == "bash":
        setup = f"source {file}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _tidemill"
        code = f"{setup}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        argv = ["bash", "--norc", "-c", code]
    elif shell == "zsh":
        argv = ["zsh", "-f", "-c", ZSH.replace("SCRIPT", str(file)).replace("WORDS", typed)]
    else:
        argv = ["fish", "--no-config", "-c", f"source {file}; complete -C {shlex.quote(' '.join(words))}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, cwd=file.parent)
    assert not done.stderr, done.stderr
    offered = {line.partition("\t")[0] for line in done.stdout.splitlines()} - {""}
    return {word for word in offered if word.startswith(words[-1])}


@pytest.mark.parametrize("shell", SHELLS)
def test_what_a_shell_offers(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "lines.jsonl").touch()
    file = tmp_path / "completion"
    file.write_text(script(cli._parser(), shell))
    for words, expected in CASES:
        offered = asked_of(shell, file, words)
        if expected is None:
            assert offered <= {"lines.jsonl", "completion"}, words
        else:
            assert offered == expected, words


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_in_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completions", shell]) == 0
    text = capsys.readouterr().out
    for word in ("serve", "submit", "simulate", "max-num-batched-tokens", "no-chunked-prefill", "api-key", "revision"):
        assert word in text
    assert re.search(r"\bpython3?\b", text.lower()) is None, "a TAB starts no Python"
