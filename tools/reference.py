"""Write docs/reference/ from the code: `python tools/reference.py [--check]`; docs/develop/papers.md from papers.toml.

`--check` compares the pages with the code and changes nothing; a test runs it.
"""

import argparse
import inspect
import sys
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference"
PAPERS = ROOT / "docs" / "develop" / "papers.toml"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from grafana_dashboard import registry_families  # noqa: E402

from engine import errors as engine_errors  # noqa: E402
from engine.config import EngineConfig  # noqa: E402
from engine.scheduling import policies  # noqa: E402
from gateway.config import ServerConfig  # noqa: E402
from gateway.endpoints import POSTS  # noqa: E402
from gateway.http import errors  # noqa: E402
from tidemill import cli  # noqa: E402
from tidemill.flags import Flag, flags_of  # noqa: E402

NOTE = "<!-- written by tools/reference.py -->\n"


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def page(title: str, *parts: str) -> str:
    return f"{NOTE}# {title}\n\n" + "\n".join(parts).rstrip() + "\n"


def cli_page() -> str:
    """Every command with its options. Settings are named there and described in config.md."""
    parts = ["`tidemill COMMAND --help` prints the same. Settings are described in [Configuration](config.md).\n"]
    _describe(cli._parser(), "tidemill", parts)
    parts.append("`tidemill bench --help` and `tidemill simulate --help` describe the measuring tools.\n")
    return page("Command line", *parts)


def _describe(parser: argparse.ArgumentParser, name: str, parts: list[str]) -> None:
    parts.append(f"## {name}\n\n{parser.description or ''}".rstrip() + "\n")
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    options = [a for a in parser._actions if a not in nested and a.dest != "help"]
    rows = [(_spelled(a), _help(a)) for a in options if not _is_setting(a)]
    if rows:
        parts.append(table(("option", "what it does"), rows))
    if settings := [f"`{a.option_strings[0]}`" for a in options if _is_setting(a)]:
        parts.append("Settings: " + ", ".join(settings) + ".\n")
    for action in nested:
        texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        parts.append(table(("command", "what it does"), [(f"`{n}`", texts.get(n, "")) for n in action.choices]))
        for inner, command in action.choices.items():
            if command.add_help:
                _describe(command, f"{name} {inner}", parts)


SETTINGS = {f"--{flag.key}": flag.help for config in (EngineConfig, ServerConfig) for flag in flags_of(config)}


def _is_setting(action: argparse.Action) -> bool:
    """Return whether the option sets a field of the configuration, and not only has the name of one."""
    text = _help(action)
    return any(text.startswith(SETTINGS.get(option) or "\0") for option in action.option_strings)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    takes = (
        ""
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
        else f" {action.metavar or action.dest.upper()}"
    )
    return ", ".join(f"`{option}{takes}`" for option in action.option_strings)


def config_page() -> str:
    intro = (
        "Each setting is a flag (`--max-model-len`), an environment variable (`TIDEMILL_MAX_MODEL_LEN`) and a key of "
        "the `--config` file (YAML, `max-model-len`). A flag wins over a variable, a variable over the file. A "
        "repeated flag is a comma-separated variable and a list in the file. `tidemill serve --dry-run` prints what "
        "a start would do.\n"
    )
    parts = [intro]
    for title, config in (("Engine", EngineConfig), ("Server", ServerConfig)):
        rows = [(f"`--{f.key}`", _default(f), f.help) for f in flags_of(config)]
        parts.append(f"## {title}\n\n" + table(("flag", "default", "what it does"), rows))
    return page("Configuration", *parts)


def _default(flag: Flag) -> str:
    if flag.default in (None, (), ""):
        return ""
    return f"`{str(flag.default).lower() if isinstance(flag.default, bool) else flag.default}`"


def api_page() -> str:
    parts = [
        "Fields of the bodies. Any other name is a 400 `unknown_parameter`. Whole numbers have 32 bits unless a field "
        "states other limits.\n"
    ]
    first: dict[int, str] = {}
    for number, post in enumerate(POSTS):
        known = next((other for other in POSTS[:number] if issubclass(post.body, other.body)), None)
        if known is not None:
            further = [f"`{name}`" for name in post.body.model_fields if name not in known.body.model_fields]
            also = f", and {', '.join(further)}" if further else ""
            parts.append(f"## POST {post.path}\n\nThe fields of `POST {known.path}`{also}.\n")
            continue
        inert, unsupported = post.unhonoured.inert, post.unhonoured.unsupported
        fields = post.body.model_fields.items()
        rows = [(f"`{name}`", f"{_kind(field.annotation)}{_limits(field)}") for name, field in fields]
        parts.append(f"## POST {post.path}\n\n" + table(("field", "value"), rows))
        if (earlier := first.setdefault(id(post.unhonoured), post.path)) != post.path:
            parts.append(f"Without effect or refused: the fields of `POST {earlier}`.\n")
            continue
        parts.append("Without effect: " + ", ".join(f"`{name}`" for name in sorted(inert)) + ".\n")
        refused = [
            f"`{name}`" + (f" (except {', '.join(f'`{value!r}`' for value in each.defaults)})" if each.defaults else "")
            for name, each in unsupported.items()
        ]
        parts.append("Refused with `unsupported_parameter` and advice: " + ", ".join(refused) + ".\n")
    return page("Fields of the API", *parts)


def _kind(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    arguments = [a for a in typing.get_args(annotation) if a is not type(None)]
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "object"
    if arguments:
        return " or ".join(dict.fromkeys(_kind(a) for a in arguments))
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
        getattr(annotation, "__name__", ""), "object"
    )


def _limits(field: Any) -> str:
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}
    given = [(words[k], v) for m in field.metadata for k in words if (v := getattr(m, k, None)) is not None]
    found = [f"{word} {value:,}" for word, value in given if value != 2**31 - 1]
    return "".join(f", {each}" for each in found + (["required"] if field.is_required() else []))


def metrics_page() -> str:
    rows = []
    for name, kind, labels, text in registry_families():
        shown = name + "_total" * (kind == "counter") + (f"{{{','.join(labels)}}}" if labels else "")
        rows.append((f"`{shown}`" + " (histogram)" * (kind == "histogram"), text))
    ours = [row for row in rows if row[0].startswith("`tidemill")]
    theirs = [row for row in rows if row[0].startswith("`vllm")]
    titles = ("name", "what it shows")
    return page(
        "Metrics",
        "`GET /metrics`, Prometheus text. Names in `_total` are counters. `class` is `online` or `offline`.\n",
        table(titles, ours),
        "\n## Names as vLLM has them\n\nThey count online work alone, for dashboards and autoscalers made for vLLM.\n",
        table(titles, theirs),
    )


def errors_page() -> str:
    rows = [(str(status), f"`{code}`", message) for status, (message, code) in sorted(errors._DEFAULTS.items())]
    tree = inspect.getdoc(engine_errors) or ""
    return page(
        "Errors",
        'Every error is `{"error": {"message", "type", "param", "code"}}`, but under `/v1/messages`: there it is as '
        "Anthropic's API has it. 429 and 503 carry `Retry-After`.\n",
        table(("status", "default code", "default message"), rows),
        f"\n## Where they come from\n\n```\n{tree}\n```\n",
    )


def policies_page() -> str:
    text = inspect.getdoc(policies) or ""
    flags = {flag.field: flag for flag in flags_of(EngineConfig)}
    rows = [(f"`--{f.key}`", _default(f), f.help) for n, f in flags.items() if n.endswith("_policy")]
    return page("Policies", table(("flag", "default", "what it does"), rows), f"\n{text}\n")


def papers_page() -> str:
    """Return the methods of the papers, from `docs/develop/papers.toml`."""
    methods = tomllib.loads(PAPERS.read_text())["method"]
    rows = [
        (
            f"{row['method']} ({row['paper']})",
            row["live"] + "".join(f", `{spelled_setting(setting)}`" for setting in row["settings"]),
            f"`{Path(row['test']).name}`",
            f"`{row['command'].removeprefix('python -m benchmarks ')}`",
            row["differs"],
        )
        for row in methods
    ]
    return page(
        "Methods of the papers",
        "`default`: each start runs the method. `option`: with the setting. `simulated`: on the virtual clock only.\n"
        "`python -m benchmarks BENCHMARK` measures it ([live](../benchmarks/performance.md),\n"
        "[simulated](../benchmarks/simulator.md)).\n",
        table(("method", "live", "test", "benchmark", "difference from the paper"), rows),
    )


def spelled_setting(setting: str) -> str:
    """Return `name` or `name=value` of a setting as it is written on the command line."""
    name, equals, value = setting.partition("=")
    flag = "--" + name.replace("_", "-")
    return flag if value == "True" or not equals else f"{flag} {value}"


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "config.md": config_page,
    "api.md": api_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "policies.md": policies_page,
    "../develop/papers.md": papers_page,
}


def main(words: list[str]) -> int:
    stale = []
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, write in PAGES.items():
        path, text = TARGET / name, write()
        if "--check" not in words:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"docs/reference: {', '.join(stale)} are not what the code says: run `make docs` and commit them")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
