"""The HTTP client of the JDK, which offers HTTP/2 with every first request of a connection."""

import json
import subprocess
from pathlib import Path

from steps import ASK, DEMO, DEMO_URL, begin, end, step

HERE = Path(__file__).resolve().parent
begin(version=subprocess.run(["java", "--version"], capture_output=True, text=True, check=True).stdout.split()[1])
subprocess.run(["javac", "-d", ".", str(HERE / "Ask.java")], check=True)


def ask(how: str, **fields: object) -> list[str]:
    body = json.dumps({"model": DEMO, "messages": [{"role": "user", "content": ASK}], "temperature": 0, **fields})
    command = ["java", "-cp", ".", "Ask", f"{DEMO_URL}/v1/chat/completions", body, how]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()


@step("three posts over one connection")
def _() -> None:
    answers = [json.loads(line) for line in ask("text")]
    assert len(answers) == 3
    assert all("Paris" in answer["choices"][0]["message"]["content"] for answer in answers)


@step("a body of unknown length (in chunks)")
def _() -> None:
    assert all("Paris" in json.loads(line)["choices"][0]["message"]["content"] for line in ask("stream"))


@step("a streamed answer")
def _() -> None:
    assert [line for line in ask("text", stream=True) if line].count("data: [DONE]") == 3


end()
