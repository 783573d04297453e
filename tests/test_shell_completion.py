"""`tidemill completions`: the words that bash and fish offer, run in the shells that are installed."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tidemill import cli
from tidemill.flags import SHELLS, actions

CASES: list[tuple[list[str], set[str]]] = [
    (["tidemill", "ser"], {"serve"}),
    (["tidemill", "batch", ""], {"run", "submit", "list", "watch", "cancel", "results"}),
    (["tidemill", "batch", "submit", "--w"], {"--window", "--watch"}),
    (["tidemill", "serve", "--devi"], {"--device"}),
    (["tidemill", "serve", "--device", ""], {"auto", "cpu", "cuda"}),
    (["tidemill", "serve", "--port", "80", "--log-level", "w"], {"warning"}),
    (["tidemill", "serve", "--no-enable"], {"--no-enable-prefix-caching"}),
    (["tidemill", "completions", "z"], {"zsh"}),
    (["tidemill", "bench", "run", "--num-w"], {"--num-warmups"}),
    (["tidemill", "simulate", "--swap"], {"--swap-space"}),
    (["tidemill", "batch", "submit", "li"], {"lines.jsonl"}),
    (["tidemill", "serve", "--config", "li"], {"lines.jsonl"}),
]
"""Words on the line, the last one incomplete, and the words that the shell offers for it."""


def offered_by(shell: str, file: Path, words: list[str]) -> set[str]:
    """Return the words that the shell offers for the last word."""
    typed = " ".join(map(shlex.quote, words))
    if shell == "bash":
        code = (
            f"source {file}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; $COMPLETE tidemill;"
            " printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        named = f"COMPLETE=$(source {file}; complete -p tidemill | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
        argv = ["bash", "--norc", "-c", f"{named}; {code}"]
    else:
        argv = ["fish", "--no-config", "-c", f"source {file}; complete -C {shlex.quote(' '.join(words))}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, cwd=file.parent)
    assert not done.stderr, done.stderr
    offered = {line.partition("\t")[0] for line in done.stdout.splitlines()} - {""}
    return {word for word in offered if word.startswith(words[-1])}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_offers_commands_flags_choices_and_files(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "lines.jsonl").touch()
    file = tmp_path / "completion"
    assert cli.main(["completions", shell]) == 0
    file.write_text(capsys.readouterr().out)
    for words, expected in CASES:
        assert offered_by(shell, file, words) == expected, words


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completions", shell]) == 0
    text = capsys.readouterr().out
    flags = {word for action in actions(cli._parser()) for word in action.option_strings if word.startswith("--")}
    assert "--max-num-batched-tokens" in flags and "--metadata" in flags
    for flag in flags | {"--num-warmups", "--host-ms"}:  # of bench and simulate, whose parsers are apart
        assert flag.removeprefix("--") in text, flag
