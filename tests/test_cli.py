"""The `tidemill` command: what it imports, its generated flags, the layers of configuration, and every wrong value."""

import argparse
import dataclasses
import importlib.metadata
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gateway
import predictor
from engine import __version__
from engine import config as engine_config
from engine.config import EngineConfig
from engine.refusals import is_loopback
from gateway.config import ServerConfig
from tidemill import cli
from tidemill import flags as command_flags
from tidemill.commands import serve
from tidemill.flags import OLLAMA, add_flags, find_given, flags_of, resolve_configs
from tidemill.vllm_flags import COUNTS, IGNORED, REFUSED, RENAMED, SEVERAL, SWITCHES, VALUES, translated


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    for flag in (*flags_of(EngineConfig), *flags_of(ServerConfig)):
        monkeypatch.delenv(flag.variable, raising=False)
    monkeypatch.delenv("TIDEMILL_CONFIG", raising=False)


def parse(*argv: str) -> argparse.Namespace:
    return cli._parser().parse_args(argv)


def configs(*argv: str, environment: dict[str, str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    engine, server = resolve_configs(parse("serve", *argv), [EngineConfig, ServerConfig], environment or {})
    return engine, server


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must be refused: exit code 2 and one line on stderr, which is returned. Standard output has
    the line of a start or nothing."""
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = int(str(stop.code))
    out, err = capsys.readouterr()
    assert code == 2 and re.fullmatch(r"(tidemill: version \S+, starting .* \.\.\.\n)?", out)
    assert err.count("\n") == 1 and err.startswith("tidemill"), err
    return err


# ---- imports and commands


PREDICTOR = ", ".join(f"predictor.{path.stem}" for path in Path(predictor.__path__[0]).glob("*.py"))


LIGHT = "torch transformers tokenizers fastapi pydantic numpy yaml"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import engine.core, engine.api, engine.engine, tidemill.simulate", "torch"),
        ("import engine.models.spec, engine.models.hub", "torch transformers numpy"),
        (f"import {PREDICTOR}", "numpy scipy torch engine gateway"),
        *(
            (f"main({argv!r})", LIGHT)
            for argv in (["--help"], ["serve", "--help"], ["version"], ["serve", "--port", "x"])
        ),
    ],
)
def test_modules_and_light_commands_load_no_heavy_library(code: str, heavy: str) -> None:
    if code.startswith("main"):
        code = f"import contextlib\nfrom tidemill.cli import main\nwith contextlib.suppress(SystemExit): {code}"
    code += f"\nimport sys; assert not (found := {set(heavy.split())} & sys.modules.keys()), found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_source_tree_that_is_not_installed_knows_its_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_only_commands_that_exist_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    offered = re.findall(r"^    (\w+)  ", shown, re.MULTILINE)
    (commands,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert sorted(offered) == sorted(commands.choices), "each command, once"
    assert "embed" in refused(capsys, "embed")
    assert "COMMAND" in refused(capsys)
    assert refused(capsys, "srve") == "tidemill: unknown command 'srve'; did you mean serve?\n"
    assert refused(capsys, "batch", "sumbit") == "tidemill batch: unknown command 'sumbit'; did you mean submit?\n"
    assert "the model is the first argument; run tidemill serve MODEL" in refused(capsys, "serve", "--model", "/x")
    assert refused(capsys, "run") == f"tidemill: unknown command 'run': {OLLAMA['run']}\n"


# ---- flags


@pytest.mark.parametrize(
    ("words", "kept", "noted"),
    [
        (["m", "--max-model-len", "4k", "--max-num-batched-tokens=2K"],
         ["m", "--max-model-len", "4000", "--max-num-batched-tokens", "2048"], []),
        (["m", "--served-model-name", "a", "b", "--port", "1"],
         ["m", "--served-model-name", "a", "--served-model-name", "b", "--port", "1"], []),
        (["--served-model-name", "a", "m"], ["--served-model-name", "a", "m"], []),
        (["--enforce-eager", "m", "--no-enable-chunked-prefill"], ["m"],
         ["--enforce-eager has no effect", "--no-enable-chunked-prefill has no effect"]),
        (["m", "--trust_remote_code", "--reasoning-parser", "qwen3"], ["m"],
         ["--trust_remote_code has no effect: code of checkpoints is never run", "--reasoning-parser has no effect"]),
        (["m", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"], ["m", "--tool-parser", "auto"],
         ["--enable-auto-tool-choice has no effect"]),
        (["m", "-tp", "1", "--dtype", "half", "--quantization", "awq", "--lora-modules", "x=/x", "y=/y"],
         ["m", "--dtype", "float16", "--quantization", "none", "--lora", "x=/x", "--lora", "y=/y"], []),
    ],
)  # fmt: skip
def test_the_command_line_of_vllm_is_taken(words: list[str], kept: list[str], noted: list[str]) -> None:
    found, notes = translated(words)
    assert found == kept
    assert [note.startswith(start) for note, start in zip(notes, noted, strict=True)] == [True] * len(noted)


def test_flags_of_vllm_with_a_name_of_ours_keep_their_own_meaning() -> None:
    own = {f"--{flag.key}" for config in (EngineConfig, ServerConfig) for flag in flags_of(config)}
    assert not own & {*SWITCHES, *IGNORED, *REFUSED, *RENAMED}
    assert own >= {*RENAMED.values(), *COUNTS, *SEVERAL, *(flag for flag, _ in VALUES)}


def test_every_field_is_a_flag_with_help() -> None:
    help_text = " ".join(f"{a.option_strings} {a.help}" for a in _options())
    for config in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config):
            assert field.metadata["help"], field.name
            if field.name != "model":
                assert f"--{field.name.replace('_', '-')}" in help_text
    assert "--no-enable-prefix-caching" in help_text


def _options() -> list[argparse.Action]:
    commands = next(a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return list(commands.choices["serve"]._actions)


def test_flags_stand_under_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for config in (EngineConfig, ServerConfig) for flag in flags_of(config)]
    grouped = list(command_flags.by_task(flags))
    assert sorted(flag.field for _, members in grouped for flag in members) == sorted(flag.field for flag in flags)
    named = {field for fields in command_flags.FLAGS.values() for field in fields.split()}
    assert named <= {flag.field for flag in flags}, "a group names a flag that is no more"
    assert {flag.field for flag in flags} - named == {"model"}, "a flag of no group would stand under more"
    shown = {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main(["serve", word])
        shown[word] = text = capsys.readouterr().out
        assert text.index("promises:") < text.index("--slo SLO") < text.index("memory:") < text.index("--swap-space")
        assert "examples:\n  tidemill serve --slo" in text
    named = {word: set(re.findall(r"^  --(?:\[no-\])?([a-z-]+)", text, re.MULTILINE)) for word, text in shown.items()}
    extra = {"config", "dry-run", "help-all"}
    assert named["--help-all"] == {flag.key for flag in flags if flag.field != "model"} | extra
    assert named["--help"] == {field.replace("_", "-") for field in command_flags.SHORT.split()} | extra
    assert shown["--help"].count("\n") < 80


def test_examples_are_commands_that_parse() -> None:
    """Every line of the examples that begins with `tidemill` is one that the parser takes."""
    parser = cli._parser()
    for text in command_flags.EXAMPLES.values():
        for line in text.splitlines():
            words = shlex.split(re.split(r" {4,}| && | > ", line)[0].replace("<(", "").replace(")", ""))
            words = words[words.index("tidemill") + 1 :]
            assert parser.parse_args(words).run


def test_flags_reach_their_fields_with_their_types() -> None:
    engine, server = configs(
        "my/model", "--dtype", "float32", "--max-model-len", "128", "--gpu-memory-utilization", "0.5",
        "--no-enable-prefix-caching", "--port", "0", "--api-key", "a", "--api-key", "b,c",
        "--served-model-name", "x", "--shutdown-timeout", "2", "--chat-template", "t.jinja",
    )  # fmt: skip
    assert engine == EngineConfig(
        model="my/model", dtype="float32", max_model_len=128, gpu_memory_utilization=0.5, enable_prefix_caching=False
    )
    assert server == ServerConfig(
        port=0, api_key=("a", "b,c"), served_model_name=("x",), shutdown_timeout=2.0, chat_template="t.jinja"
    )
    assert configs("--enable-prefix-caching")[0].enable_prefix_caching


def test_a_new_field_becomes_a_flag_by_itself() -> None:
    @dataclasses.dataclass(frozen=True)
    class More:
        new_thing: float | None = engine_config.flag(None, "100% new")

    parser = argparse.ArgumentParser()
    flags = flags_of(More)
    add_flags(parser, flags)
    assert "100% new" in parser.format_help()
    arguments = vars(parser.parse_args(["--new-thing", "1.5"]))
    assert find_given(flags, arguments, {}, {}) == {"new_thing": (1.5, "flag")}


# ---- layers


def test_command_line_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "tidemill.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nmax-model-len: 8\nmodel: from-file\nserved-model-name: [f, g]\n")
    environment = {"TIDEMILL_PORT": "3", "TIDEMILL_MAX_NUM_SEQS": "4", "TIDEMILL_API_KEY": "k, l"}
    engine, server = configs("--config", str(file), "--port", "5", environment=environment)
    assert (server.port, engine.max_num_seqs, engine.max_model_len, engine.model) == (5, 4, 8, "from-file")
    assert server.served_model_name == ("f", "g") and server.api_key == ("k", "l")
    assert engine.max_num_batched_tokens == EngineConfig().max_num_batched_tokens
    engine, _ = configs("from-line", environment={"TIDEMILL_CONFIG": str(file), "TIDEMILL_MODEL": "from-variable"})
    assert (engine.model, engine.max_model_len) == ("from-line", 8)
    assert configs(environment={"TIDEMILL_MODEL": "from-variable"})[0].model == "from-variable"


def test_empty_variables_and_null_values_count_as_not_set(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-model-len: null\nchat-template:\n")
    engine, server = configs("--config", str(file), environment={"TIDEMILL_PORT": "", "TIDEMILL_API_KEY": ""})
    assert (engine, server) == (EngineConfig(), ServerConfig())
    file.write_text("# nothing\n")
    assert configs("--config", str(file)) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_booleans_in_the_environment(word: str) -> None:
    assert configs(environment={"TIDEMILL_ENABLE_PREFIX_CACHING": word})[0].enable_prefix_caching
    assert not configs(environment={"TIDEMILL_ENABLE_PREFIX_CACHING": "off"})[0].enable_prefix_caching


# ---- wrong values


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--port", "x"], "--port must be a whole number"),
        (["--port", "1.5"], "--port must be a whole number"),
        (["--port", "-1"], "--port must be between"),
        (["--port", "65536"], "--port must be between"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "63"],
            "--max-num-batched-tokens is below --max-num-seqs",
        ),
        (["--max-model-len", "0"], "--max-model-len must be at least 1"),
        (["--num-gpu-blocks-override", "0"], "--num-gpu-blocks-override must be at least 1"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization is a share, above 0 and at most 1"),
        (["--gpu-memory-utilization", "90"], "is a share, above 0 and at most 1, not 90.0; did you mean 0.9?"),
        (["--gpu-memory-utilization", "1.2"], "is a share, above 0 and at most 1, not 1.2"),
        (["x", "-tp", "2"], "-tp is a flag of vLLM: an engine runs on one GPU"),
        (["x", "--ssl-keyfile", "key.pem"], "--ssl-keyfile is a flag of vLLM: put a proxy"),
        (["x", "--tokenizer=other"], "--tokenizer is a flag of vLLM: the checkpoint's tokenizer is used"),
        (["--gpu-memory-utilization", "90%"], "--gpu-memory-utilization must be a number"),
        (["--dtype", "int8"], "--dtype must be one of auto, bfloat16, float16, float32, not 'int8'"),
        (["--device", "tpu"], "--device must be one of"),
        (["--load-format", "pt"], "--load-format must be one of"),
        (["--log-level", "loud"], "--log-level must be one of"),
        (["--host", "0.0.0.0"], "--host is reachable from other machines; set --api-key"),
        (["--host", "::"], "--host is reachable"),
        (["--host", "example.org"], "--host is reachable"),
        (["--host", ""], "--host must not be empty"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--api-key", " x"], "--api-key must not"),
        (["--served-model-name", " "], "--served-model-name must not be empty"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout must be between"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout must be between"),
        (["--slo", "ttft=1"], "--slo: SLO 'ttft=1': unknown statistic"),
        (["--qqqqqqqq", "1"], "serve: unrecognized arguments: --qqqqqqqq; tidemill serve --help shows"),
        (["--max-num-seq", "1"], "--max-num-seq; did you mean --max-num-seqs?"),
        (["--max-num", "1"], "--max-num"),
        (["--port"], "--port"),
        (["a", "b"], "b"),
        (["--config", "missing.yaml"], "--config missing.yaml: No such file"),
        (["models/caf\udce9"], "MODEL models/caf\\xe9 is not UTF-8; rename it, or link to it"),
        (["--profile-dir", "\udcff"], "--profile-dir \\xff is not UTF-8"),
        (["--lora", "sql=\udcff"], "--lora sql=\\xff is not UTF-8"),
    ],
)
def test_a_wrong_value_is_one_clear_line(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    assert named in refused(capsys, "serve", *argv)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("TIDEMILL_PORT", "tcp://10.0.0.1:8000", "TIDEMILL_PORT must be a whole number, not 'tcp://10.0.0.1:8000'"),
        ("TIDEMILL_ENABLE_PREFIX_CACHING", "maybe", "TIDEMILL_ENABLE_PREFIX_CACHING must be true or false"),
        ("TIDEMILL_DTYPE", "int8", "TIDEMILL_DTYPE must be one of"),
    ],
)
def test_a_wrong_variable_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert named in refused(capsys, "serve")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("prot: 1", "unknown key 'prot' (did you mean 'port'?)"),
        ("max_num_seqs: 1", "unknown key 'max_num_seqs' (did you mean 'max-num-seqs'?)"),
        ("port: true", "port must be a whole number, not True"),
        ("port: 1.0", "port must be a whole number"),
        ('port: "1"', "port must be a whole number"),
        ("port: null", "port must be a whole number"),
        ("port: 99999", "--port must be between"),
        ("host: 1", "host must be text"),
        ("dtype: int8", "dtype must be one of"),
        ("enable-prefix-caching: 1", "enable-prefix-caching must be true or false"),
        ("gpu-memory-utilization: half", "gpu-memory-utilization must be a number"),
        ("api-key: [1]", "api-key must be text"),
        ("- port", "must hold"),
        ("port: [1", "not valid YAML (line"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        (b"\xff\xfe\x00", "not"),
    ],
)
def test_a_wrong_file_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | bytes, named: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert named in refused(capsys, "serve", "--config", str(file))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    ServerConfig(host=host)
    assert not is_loopback("10.0.0.1") and not is_loopback("localhost.example.org")
    assert ServerConfig(host="0.0.0.0", api_key=("k",)).api_key == ("k",)


def test_keys_are_not_in_the_repr() -> None:
    assert "secret-key" not in repr(ServerConfig(api_key=("secret-key",)))


# ---- serve


def test_a_port_in_use_is_found_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "engine.build", None)  # type: ignore[arg-type]  # its import would fail
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = refused(capsys, "serve", "--port", str(port))
        assert re.search(rf"--port {port} is in use by .+ \(pid {os.getpid()}\); use another port", told)


@pytest.mark.slow
def test_a_model_that_cannot_be_served_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has no config.json" in refused(capsys, "serve", str(tmp_path), "--port", "0")
    assert "cuda" in refused(capsys, "serve", "--port", "0", "--device", "cuda") or _has_cuda()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.mark.slow
def test_serve_joins_the_parts_and_says_what_runs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real model, tokenizer and engine; only the HTTP side is watched instead of run."""
    seen: dict[str, Any] = {}

    class App:
        @staticmethod
        def create_app(client: Any, tokenizer: Any, config: ServerConfig, folder: Any, limits: Any, _: Any) -> str:
            seen.update(client=client, tokenizer=tokenizer, config=config, folder=folder, limits=limits)
            return "app"

    class Server:
        @staticmethod
        def bind(host: str, port: int) -> socket.socket:
            seen.update(address=(host, port))
            return socket.socket()

        @staticmethod
        def run(app: str, config: ServerConfig) -> int:
            seen.update(app=app, run_config=config)
            return 0

    monkeypatch.setitem(sys.modules, "gateway.app", App)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "gateway.server", Server)  # type: ignore[arg-type]
    monkeypatch.setattr(gateway, "server", Server, raising=False)
    argv = ["serve", "--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "20"]
    assert cli.main([*argv, "--profile-seconds", "0"]) == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0] == f"tidemill: version {__version__}, starting tidemill-demo ..."
    assert "context limited to the 320 tokens" in out and "GiB of weights" in out
    assert seen["address"] == ("127.0.0.1", 0)
    assert seen["app"] == "app" and seen["config"] is seen["run_config"]
    assert seen["folder"].root.name == "tidemill" and seen["limits"].window_lines == 4 * 64
    assert seen["config"].served_model_name == ("tidemill-demo",)
    assert seen["client"].info.max_model_len == 320
    ids = seen["tokenizer"].encode_chat([{"role": "user", "content": "hi"}])
    assert ids and max(ids) < seen["client"].info.vocab_size


def test_the_name_in_the_api_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama").mkdir()
    assert serve.model_name(EngineConfig(model=str(tmp_path / "llama") + "/")) == "llama"
    assert serve.model_name(EngineConfig(model="owner/name")) == "owner/name"
    assert serve.model_name(EngineConfig()) == "tidemill-demo"
    (tmp_path / "caf\udce9").mkdir()
    monkeypatch.chdir(tmp_path / "caf\udce9")
    assert serve.model_name(EngineConfig(model=".")) == "caf\ufffd"
