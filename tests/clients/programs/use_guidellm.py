"""guidellm: short benchmarks with made-up prompts."""

import json
import subprocess
import sys
from pathlib import Path

from steps import DEMO, DEMO_URL, begin, end, step

begin("guidellm")
TOKENIZER = Path(__file__).resolve().parents[3] / "engine" / "models" / "demo" / "weights"


RUNS = (
    ("/v1/completions", "kind=synchronous"),
    ("/v1/chat/completions", "kind=concurrent,streams=3"),
    ("/v1/responses", "kind=synchronous"),
)


@step("run: completions, chat (3 at once), responses")
def _() -> None:
    for path, profile in RUNS:
        words: list[str | Path] = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console"]
        words += ["--backend", f"kind=openai_http,target={DEMO_URL},model={DEMO},request_format={path}"]
        words += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--profile", profile]
        words += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        words += ["--constraint", "kind=max_requests,count=6", "--output", "kind=json,path=report.json"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-600:] + done.stderr[-1500:]
        report = json.loads(Path("report.json").read_text())["benchmarks"][0]
        totals, errors = report["metrics"]["request_totals"], report["requests"]["errored"]
        assert totals["successful"] == 6 and not errors, (path, totals, errors[:1])


end()
