"""`tidemill serve --dry-run`: every setting with its origin, the model to load, and the errors of a start."""

import fcntl
import platform
import re
import socket
import sys
from pathlib import Path

import pytest
import tiny_transformers
import torch
from tiny_models import llama_config, write_config

from engine import __version__
from engine.config import EngineConfig
from gateway.config import ServerConfig
from tidemill import cli
from tidemill.commands import serve
from tidemill.flags import flags_of


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for flag in (*flags_of(EngineConfig), *flags_of(ServerConfig)):
        monkeypatch.delenv(flag.variable, raising=False)
    monkeypatch.delenv("TIDEMILL_CONFIG", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows(out: str) -> dict[str, tuple[str, str]]:
    """Value and origin by flag."""
    found = re.findall(r"^[* ] (--\S+|MODEL) +(.*?)  +(.*)$", out, re.MULTILINE)
    return {flag: (value.strip(), origin) for flag, value, origin in found}


def dry_run(*argv: str) -> int:
    return cli.main(["serve", "--dry-run", "--port", "0", "--device", "cpu", *argv])


def test_every_setting_with_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("max-num-seqs: 8\nslo: 5%\n")
    monkeypatch.setenv("TIDEMILL_SLO", "tbt_mean=50ms")
    assert dry_run("--config", str(file), "--dtype", "float32", "--max-model-len", "256", "--api-key", "geheim") == 0
    out = capsys.readouterr().out
    shown = rows(out)
    keys = {f"--{flag.key}" for kind in (EngineConfig, ServerConfig) for flag in flags_of(kind)} - {"--model"}
    assert shown.keys() == {"MODEL", *keys}
    assert shown["--max-num-seqs"] == ("8", str(file))
    assert shown["--slo"] == ("tbt_mean=50ms", "TIDEMILL_SLO")
    assert shown["--dtype"] == ("float32", "flag")
    assert shown["--max-queue-time"][1] == "default"
    assert shown["--num-gpu-blocks-override"][1] == "measured: free memory"
    assert shown["--served-model-name"] == ("tidemill-demo", "the model")
    assert shown["--api-key"] == ("(1 set)", "flag") and "geheim" not in out
    assert {line.split()[1] for line in out.splitlines() if line.startswith("* ")} == {
        "--max-num-seqs", "--slo", "--dtype", "--max-model-len", "--api-key", "--port", "--device"
    }  # fmt: skip
    for words in (
        "tidemill-demo: LlamaForCausalLM",
        "weights 16 MiB, cache ",
        " free",
        "none stored: a start would measure",
    ):
        assert words in out
    assert not (tmp_path / "state").exists() and not (tmp_path / "cache").exists(), "nothing was made"


@pytest.mark.parametrize(("argv", "code"), [((), 0), (("--online-policy", "soon"), 2)])
def test_machine_and_settings_are_shown_beside_an_error_as_well(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], code: int
) -> None:
    assert dry_run(*argv) == code
    out = capsys.readouterr().out
    assert not argv or rows(out)["--online-policy"] == ("soon", "flag")
    lines = [line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines()]
    shown = {label: text for label, text in lines if label.isalpha()}
    assert shown["tidemill"] == __version__ and shown["python"].startswith(platform.python_version())
    assert {"cpu", "memory", "gpu"} <= shown.keys() and f"torch {torch.__version__}" in shown["libraries"]


def test_what_is_not_here_is_not_fetched(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # would be refused
    assert dry_run("nobody/has-this") == 0
    out = capsys.readouterr().out
    assert "nobody/has-this is not on this machine; `tidemill pull nobody/has-this`" in out
    assert rows(out)["MODEL"] == ("nobody/has-this", "flag")


def test_errors_of_the_start_are_those_of_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("--num-gpu-blocks-override", "2", "--max-model-len", "64") == 2
    assert "--max-model-len 64 does not fit" in capsys.readouterr().err
    assert dry_run("/no/such/folder") == 2
    assert "'/no/such/folder' is neither a folder nor a Hugging Face id" in capsys.readouterr().err


def test_what_others_hold_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert dry_run("--port", str(other.getsockname()[1])) == 2
    assert "is in use by " in capsys.readouterr().err
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert dry_run("--state-dir", str(tmp_path)) == 2
    assert "is in use by another server" in capsys.readouterr().err
    assert dry_run("--request-log", str(tmp_path / "none" / "log")) == 2
    assert "--request-log" in capsys.readouterr().err
    assert dry_run("--request-log", str(tmp_path / "log")) == 0
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--online-policy", "nonsense"), "unknown online policy 'nonsense'"),
        (("--online-policy", "fcfs:1"), "online policy 'fcfs:1'"),
        (("--slo", "nonsense"), "--slo: SLO 'nonsense'"),
        (("--profile-dir", "{tmp}/file"), "--profile-dir {tmp}/file cannot be used"),
        (("--lora", "a={tmp}/none"), "--lora a: {tmp}/none has no adapter_config.json"),
        (("--revision", "x"), "--revision needs a model from the hub; name a MODEL"),
        (("--threads", "100000"), "--threads must be at most 1024"),
        (("--engines", "100000"), "--engines must be between 1 and 256"),
        (("--chat-template", "{tmp}/none"), "--chat-template {tmp}/none: No such file"),
        (("--api-key-file", "{tmp}/none"), "--api-key-file {tmp}/none: No such file"),
        (("--request-log", "{tmp}"), "--request-log {tmp}: Is a directory"),
        (("--state-dir", "{tmp}/file"), "--state-dir {tmp}/file cannot be used: Not a directory"),
        (("--ray", "nonsense"), "--ray must be HOST:PORT, auto or local, not 'nonsense'"),
        (("--ray", "10.0.0.1:6379"), "--ray needs ray; run "),
        (
            ("--overload", "hidden", "--online-policy", "fcfs"),
            "--overload hidden needs a policy that selects requests; set --online-policy",
        ),
    ],
)
def test_a_wrong_value_starts_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: tuple[str, ...],
    named: str,
    dry: tuple[str, ...],
) -> None:
    started: list[object] = []
    monkeypatch.setattr(serve, "_load", lambda *given: started.append(given))
    monkeypatch.setitem(sys.modules, "ray", None)  # also where it is installed
    (tmp_path / "file").touch()
    words = [word.replace("{tmp}", str(tmp_path)) for word in argv]
    assert cli.main(["serve", "--port", "0", *words, *dry]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tidemill") and error.count("\n") == 1
    assert named.replace("{tmp}", str(tmp_path)) in error
    assert not started and [path.name for path in tmp_path.iterdir()] == ["file"], "and nothing is made"


def test_where_several_engines_would_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert dry_run("--engines", "2", "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert "engine 0" in out and "engine 1" in out and "processors" in out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert dry_run("--engines", "2", "--device", "cuda") == 2
    assert "--engines 2 needs as many CUDA devices; 0 can be seen" in capsys.readouterr().err
    assert dry_run("--engines", "0") == 2


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--engines", "1"], "makes one pipeline of two engines, not of --engines 1; set --engines 2"),
        (["--ray", "local"], "cannot be combined with --ray"),
        (["--lora", "sums=folder"], "cannot be combined with --lora"),
    ],
)
@pytest.mark.parametrize("way", ["serve", "dry run"])
def test_what_a_drop_does_not_go_with_is_refused_before_a_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str, argv: list[str], why: str
) -> None:
    monkeypatch.setattr(serve, "_make_engine", lambda *_args: pytest.fail("an engine is made"))
    base = ["--dry-run"] if way == "dry run" else []
    given = ["serve", *base, "--port", "0", "--device", "cpu", "--engines", "2", "--overload", "drop", *argv]
    assert cli.main(given) == 2
    err = capsys.readouterr().err
    assert "--overload drop " in err and why in err and err.count("\n") == 1


def test_a_model_that_cannot_give_up_layers_is_refused_before_its_weights_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tiny_transformers.save_config("lfm2", tmp_path / "recurrent")
    write_config(tmp_path / "flat", llama_config(num_hidden_layers=1))
    for name, why in (("recurrent", "transformers' modules run"), ("flat", "one layer")):  # neither has weights
        assert dry_run(str(tmp_path / name), "--engines", "2", "--overload", "drop") == 2
        err = capsys.readouterr().err
        assert (
            err.startswith("tidemill: --overload drop is not supported here: ") and why in err and err.count("\n") == 1
        )
