"""A real Prometheus scrapes a live server under load, every query of every Grafana panel gives data, and
promtool has nothing to say of our metrics. Slow."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from support.lazy import openai

ROOT = Path(__file__).resolve().parent.parent
SERVE = [sys.executable, "-m", "gateway", "serve", "--device", "cpu"]
SERVE += ["--profile-seconds", "5", "--num-gpu-blocks-override", "300"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], url: str, folder: Path) -> Iterator[None]:
    """A process that answers at `url`, ended afterwards."""
    with (folder / f"{Path(command[0]).name}.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(600):
                if process.poll() is not None:
                    pytest.fail(f"{command[0]} ended:\n{(folder / Path(log.name).name).read_text()[-2000:]}")
                try:
                    if httpx.get(url).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(60)


def use(url: str) -> None:
    """A batch beside chats, one bad line and one repeated prompt among them."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
    body = {
        "model": "tidemill-demo",
        "messages": [{"role": "user", "content": "What is a batch? " * 8}],
        "max_tokens": 24,
    }
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(120)]
    lines[7] = lines[7] | {"body": body | {"max_tokens": 0}}
    file = client.files.create(file=("rows.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    for _ in range(600):
        question = [{"role": "user", "content": "What is tidemill?"}]
        answer = client.chat.completions.create(model="tidemill-demo", messages=question, max_tokens=20, stream=True)  # type: ignore[arg-type]
        assert list(answer)
        if client.batches.retrieve(batch.id).status == "completed":
            return
    raise AssertionError("the batch did not end")


@pytest.mark.manual
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_every_panel_has_data(tmp_path: Path) -> None:
    port, own = free_port(), free_port()
    url, prometheus = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{own}"
    serve = [*SERVE, "--port", str(port), "--state-dir", str(tmp_path / "state")]
    config = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    del job["authorization"], config["rule_files"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    config["global"]["scrape_interval"] = "1s"
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    scrape = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    absent = {"Queue empty at", "Layers dropped"}  # no batch runs any more; one engine
    dashboard = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "tidemill.json").read_text())
    with running(serve, f"{url}/ready", tmp_path), running(scrape, f"{prometheus}/-/ready", tmp_path):
        time.sleep(3)  # two scrapes before the load, so that its counters have a rate
        use(url)
        time.sleep(3)
        metrics = httpx.get(f"{url}/metrics").text
        empty = []
        for panel in [inner for outer in dashboard["panels"] for inner in outer.get("panels", [outer])]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "60s").replace("$instance", ".*")
                answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}).json()
                assert answer["status"] == "success", (panel["title"], answer)
                if not answer["data"]["result"] and panel["title"] not in absent:
                    empty.append(f"{panel['title']}: {target['expr']}")
    assert empty == []
    lint = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True, check=False)
    ours = [
        line for line in lint.stderr.splitlines() if line and not line.startswith("vllm:")
    ]  # vLLM's names have colons
    assert "tidemill_slo_attainment" in metrics and ours == []
