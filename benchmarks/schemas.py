"""A file of JSON schemas with valid and invalid instances against the enforced grammars: every verdict, then answers.

`FILE`: lines of JSON, gzipped or not: {"name", "schema", "tests": [{"valid", "data"}, ...]}, as MaskBench's. Each
schema is compiled as the server does it, with the packaged tokenizer, and each instance goes through its grammar token
by token, written as compact JSON. Then a server with the packaged model answers every schema at `--temperature`, and
what ends is validated by jsonschema-rs. Exits 1 where a valid instance is refused, an invalid one admitted, an answer
invalid, an error without a reason, or the server says otherwise.
"""

import argparse
import asyncio
import gzip
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from benchmarks.live import PACKAGED, completions, demo_server
from benchmarks.machine import describe
from engine.errors import InvalidRequestError
from engine.forms import Grammar
from engine.models.spec import load_spec
from engine.structured.compiler import CompiledGrammar, GrammarCompiler
from engine.text.tokenizer import Tokenizer

PARAM = "structured_outputs.json"
Schema = dict[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Case:
    """A schema; `tests`: (whether it is valid, an instance)."""

    name: str
    schema: Schema
    tests: Sequence[tuple[bool, Any]]


@dataclass(slots=True)
class Findings:
    """`compiled`: names of schemas; `refused`: why, by name; `wrong`: what breaks a promise, in words."""

    compiled: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def read_cases(path: Path) -> Iterator[Case]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            value = json.loads(line)
            yield Case(value["name"], value["schema"], [(each["valid"], each["data"]) for each in value["tests"]])


class Judge:
    """Compiles schemas and leads instances through them, as the server would."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.load(folder, probe=False)
        spec = load_spec(folder)
        self._compiler = GrammarCompiler(folder, spec.vocab_size, spec.eos_token_ids)

    def judge(self, case: Case, findings: Findings) -> None:
        grammar = Grammar("json", json.dumps(case.schema, ensure_ascii=False), param=PARAM)
        try:
            compiled = self._compiler.compile(grammar)
        except InvalidRequestError as error:
            findings.refused[case.name] = error.message
            return
        findings.compiled.append(case.name)
        for valid, data in case.tests:
            admitted = self._admits(compiled, data)
            findings.counts[f"{'valid' if valid else 'invalid'} {'admitted' if admitted else 'refused'}"] += 1
            if admitted != valid:
                kind = "a valid instance is refused" if valid else "an invalid instance is admitted"
                findings.wrong.append(f"{case.name}: {kind}")

    def _admits(self, compiled: CompiledGrammar, data: Any) -> bool:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        matcher = compiled.matcher()
        matcher.advance(self._tokenizer.encode(text, add_special_tokens=False))
        return matcher.failed is None and matcher.complete


async def answer_all(url: str, cases: Sequence[Case], findings: Findings, options: argparse.Namespace) -> None:
    """Every schema asked of a server; its answers and refusals go to the findings."""
    async with completions(url, options.concurrency) as ask_server:

        async def ask(number: int, case: Case) -> None:
            status, answer = await ask_server(
                model="tidemill-demo",
                prompt="A document as JSON: ",
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                seed=options.seed + number,
                structured_outputs={"json": json.dumps(case.schema, ensure_ascii=False)},
            )
            take_answer(case, status, answer, findings)

        await asyncio.gather(*(ask(number, case) for number, case in enumerate(cases)))


def take_answer(case: Case, status: int, answer: Mapping[str, Any], findings: Findings) -> None:
    """Compare the server's answer to a schema with the verdict without a server."""
    if status == HTTPStatus.BAD_REQUEST:
        findings.counts["400"] += 1
        if answer["error"]["message"] != findings.refused.get(case.name) or answer["error"]["param"] != PARAM:
            findings.wrong.append(f"{case.name}: another error over HTTP: {answer['error']}")
        return
    if status != HTTPStatus.OK or case.name in findings.refused:
        findings.wrong.append(f"{case.name}: the server answered {status}")
        return
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        findings.counts["cut off"] += 1
        return
    findings.counts["ended"] += 1
    if not is_valid(case.schema, choice["text"]):
        findings.wrong.append(f"{case.name}: an invalid answer: {choice['text'][:200]}")


def is_valid(schema: Schema, text: str) -> bool:
    """The oracle's word on an answer. A number beyond a double's range, which is JSON, too, becomes the largest
    double."""
    import jsonschema_rs  # of the extra dev, which a load generator does not need

    try:
        value = json.loads(text, parse_float=_finite)
    except ValueError:
        return False
    return bool(jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(value))


def _finite(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


def report(findings: Findings) -> str:
    total = len(findings.compiled) + len(findings.refused)
    counts = findings.counts
    lines = [f"{total} schemas: {len(findings.compiled)} are enforced, {len(findings.refused)} refused"]
    lines += [f"  {name}: {count}" for name, count in sorted(counts.items())]
    reasons = Counter(message.partition("cannot be enforced: ")[2] for message in findings.refused.values())
    lines += ["refused, by reason:", *(f"  {count:4d}  {reason}" for reason, count in reasons.most_common())]
    lines += [f"WRONG: {each}" for each in findings.wrong]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks schemas", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-answers", action="store_true", help="the verdicts alone, without a server")
    options = parser.parse_args(argv)
    cases, findings, judge = list(read_cases(options.file)), Findings(), Judge(PACKAGED)
    for case in cases:
        judge.judge(case, findings)
    findings.wrong += [f"{name}: no reason" for name, text in findings.refused.items() if not text.partition(": ")[2]]
    if not options.no_answers:
        with (
            tempfile.TemporaryDirectory() as state,
            demo_server(state) as served,
        ):
            asyncio.run(answer_all(served.url, cases, findings, options))
    print(f"{options.file.name}, temperature {options.temperature:g}, seed {options.seed}; {describe()}")
    print(report(findings))
    sys.exit(bool(findings.wrong))
