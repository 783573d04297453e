"""curl with an offer of HTTP/2, with HTTP/1.0, and with a body sent in chunks."""

import json
import subprocess

from steps import ASK, DEMO, DEMO_URL, begin, end, step

BODY = json.dumps({"model": DEMO, "messages": [{"role": "user", "content": ASK}], "temperature": 0})


def curl(*words: str, body: str = BODY) -> str:
    command = ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "60", *words]
    command += ["--header", "content-type: application/json", "--data-binary", "@-", f"{DEMO_URL}/v1/chat/completions"]
    return subprocess.run(command, input=body, capture_output=True, text=True, check=True).stdout


begin(version=subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True).stdout.split()[1])

OFFERS = {
    "--http2 (an offer of h2c)": ["--http2"],
    "--http1.0": ["--http1.0"],
    "a body in chunks": ["--header", "transfer-encoding: chunked"],
    "--http2 with a body in chunks": ["--http2", "--header", "transfer-encoding: chunked"],
    "Expect: 100-continue": ["--header", "expect: 100-continue"],
}
for name, words in OFFERS.items():

    @step(name)
    def _(words: list[str] = words) -> None:
        assert "Paris" in json.loads(curl(*words))["choices"][0]["message"]["content"]


@step("--no-buffer, a stream")
def _() -> None:
    stream = curl("--no-buffer", "--http2", body=json.dumps({**json.loads(BODY), "stream": True}))
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events[-1] == "[DONE]" and len(events) > 3


end()
