"""`python -m benchmarks schemas`: what it reads, what it judges, and what it calls wrong."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks.schemas import Case, Findings, is_valid, take_answer

AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
LINES: list[dict[str, Any]] = [
    {
        "name": "age",
        "schema": AGE,
        "tests": [{"valid": True, "data": {"age": 3}}, {"valid": False, "data": {"age": -1}}],
    },
    {"name": "not", "schema": {"not": {}}, "tests": []},
]
TOLD = [
    {
        "name": "lie",
        "schema": AGE,
        "tests": [{"valid": True, "data": {"age": -1}}, {"valid": False, "data": {"age": 1}}],
    }
]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


@pytest.mark.parametrize(("lines", "code"), [(LINES, 0), (LINES + TOLD, 1)])
def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: Any, code: int, monkeypatch: Any) -> None:
    path = write(tmp_path / "cases.jsonl.gz", lines)
    monkeypatch.setattr("sys.argv", ["bench", "schemas", str(path), "--no-answers"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == code
    printed = capsys.readouterr().out
    assert "1 refused" in printed and 'the keywords "not"' in printed and "valid admitted: 1" in printed
    assert printed.count("WRONG: lie: ") == 2 * code


def test_answers_are_judged_by_the_oracle() -> None:
    cases = [Case(line["name"], line["schema"], ()) for line in LINES]
    findings = Findings(refused={"not": "'p' cannot be enforced: why"})

    def answer(case: Case, text: str, reason: str = "stop") -> None:
        take_answer(case, 200, {"choices": [{"text": text, "finish_reason": reason}]}, findings)

    answer(cases[0], '{"age":1}')
    answer(cases[0], '{"age":', "length")
    error = {"message": "'p' cannot be enforced: why", "param": "structured_outputs.json"}
    take_answer(cases[1], 400, {"error": error}, findings)
    assert not findings.wrong and findings.counts == {"ended": 1, "cut off": 1, "400": 1}
    answer(cases[0], '{"age":-1}')
    answer(cases[1], "{}")
    take_answer(cases[0], 500, {}, findings)
    take_answer(cases[1], 400, {"error": {**error, "message": "no"}}, findings)
    assert len(findings.wrong) == 4
    assert is_valid({"type": "number"}, "1e999") and not is_valid({"type": "number", "maximum": 1}, "1e999")
