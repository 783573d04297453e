"""docker/: the checks that need no container engine. The dashboard names only metrics that the server shows; the
image copies what exists; the entry point never opens a server without a key; files parse and agree with each other."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from engine.config import EngineConfig
from engine.refusals import check_combinations
from gateway.config import ServerConfig
from gateway.server import CLOSE_SECONDS, LAST_SECONDS
from gateway.store.folder import find_state
from tidemill.cli import _parser
from tidemill.flags import flags_of, resolve_configs, unknown_variables

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_dashboard", ROOT / "tools" / "grafana_dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_metric_that_is_not_shown_is_an_error(tool: ModuleType) -> None:
    known = tool.registry_names()
    assert "tidemill_slo_attainment" in known and "tidemill_batch_lines_total" in known
    with pytest.raises(ValueError, match="tidemill_slo_attainment"):
        tool.dashboard(known - {"tidemill_slo_attainment"})


def test_the_dashboard_can_be_imported_anywhere_and_shows_the_promise_first(tool: ModuleType) -> None:
    written = tool.dashboard(tool.registry_names())
    panels = [inner for outer in written["panels"] for inner in outer.get("panels", [outer])]
    assert {variable["name"] for variable in written["templating"]["list"]} == {"datasource", "instance"}
    for panel in panels:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}" and 'instance=~"$instance"' in target["expr"]
    assert [panel["title"] for panel in panels[:2]] == ["Chats within their limits", "Above the goal by"]
    limits = [
        panel["title"] for panel in panels if any(t["legendFormat"].startswith("limit") for t in panel["targets"])
    ]
    assert limits == [
        "Time to first token, chat", "Time between tokens, chat", "Requests within their promise, by class"
    ]  # fmt: skip
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels) and len({panel["id"] for panel in panels}) == len(panels)


def test_alerts_name_metrics_that_are_shown(tool: ModuleType) -> None:
    rules = yaml.safe_load((DOCKER / "prometheus" / "rules.yml").read_text())["groups"][0]["rules"]
    labels = {name: set(labels) for name, _, labels, _ in tool.registry_families()}
    for rule in rules:
        named = set(re.findall(r"tidemill_\w+", rule["expr"]))
        assert named <= tool.registry_names(), rule["alert"]
        joined = re.findall(r"on\(([^)]*)\)", rule["expr"])
        for name in named if joined else ():
            assert set(joined[0].split(", ")) - {"instance", "job"} <= labels[name], (rule["alert"], name)


def test_the_image_copies_what_exists_and_holds_no_key() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    copies = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", text, re.MULTILINE)
    sources = [word for words in copies for word in words.split()]
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {"pyproject.toml", *(name.removesuffix("*") for name in packages)} <= set(sources)
    # without these two and a compiler the wheel is built all the same, only without the native kernels
    assert {"setup.py", "MANIFEST.in"} <= set(sources)
    wheel_stage = text.partition("AS base")[0]
    assert " g++ " in wheel_stage and "grep libtidemill_cpu.so" in wheel_stage
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored, source
    assert re.findall(r"AS (\w+)", text)[-1] == "cpu" and text.count("USER 10001:10001") == 2
    assert "API_KEY=" not in text


def run_entry_point(tmp_path: Path, **environment: str) -> tuple[str, str]:
    """What `tidemill` was started with, its key and the entry point's words; the state volume is a folder."""
    script = (DOCKER / "entrypoint.sh").read_text().replace("/var/lib/tidemill", str(tmp_path))
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "tidemill").write_text('#!/bin/sh\nprintf "%s|%s" "$*" "${TIDEMILL_API_KEY:-}"\n')
    (tools / "tidemill").chmod(0o755)
    (tools / "python").unlink(missing_ok=True)
    (tools / "python").symlink_to(sys.executable)
    path = f"{tools}:{os.environ['PATH']}"
    command = ["sh", "-c", script, "entrypoint", "serve", "--port", "9"]
    done = subprocess.run(command, env={"PATH": path, **environment}, capture_output=True, text=True, check=True)
    words, _, last = done.stdout.rpartition("\n")
    return words, last


def test_the_entry_point_makes_a_key_once_and_keeps_it_private(tmp_path: Path) -> None:
    words, last = run_entry_point(tmp_path)
    arguments, key = last.split("|")
    assert arguments == "serve --port 9" and len(key) >= 40 and key not in words
    assert (tmp_path / "api-key").stat().st_mode & 0o077 == 0
    assert run_entry_point(tmp_path)[1].split("|")[1] == key


def test_a_key_that_was_given_is_used(tmp_path: Path) -> None:
    assert run_entry_point(tmp_path, TIDEMILL_API_KEY="mine")[1] == "serve --port 9|mine"
    assert run_entry_point(tmp_path, TIDEMILL_API_KEY_FILE="/keys")[1] == "serve --port 9|"
    assert run_entry_point(tmp_path, TIDEMILL_STATE_DIR="postgresql://h/d?objects=s3://b")[1] == "serve --port 9|"
    assert not (tmp_path / "api-key").exists()


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_compose_mounts_what_exists() -> None:
    for name in ("compose.cluster.yaml", "compose.yaml"):
        (compose,) = documents(DOCKER / name)
        for service in compose["services"].values():
            for volume in service.get("volumes", ()):
                source = volume.split(":")[0]
                assert source in compose["volumes"] or (DOCKER / source).is_dir(), volume
    prometheus = compose["services"]["prometheus"]
    assert "prometheus:/prometheus" in prometheus["volumes"]  # data go there with any default of the image
    assert "--storage.tsdb.path=/prometheus" in prometheus["command"]
    (gpu,) = documents(DOCKER / "compose.gpu.yaml")
    assert set(gpu["services"]) <= set(compose["services"])


def test_the_manifests_agree_on_names_and_ports() -> None:
    folder = DOCKER / "deploy" / "kubernetes"
    (service,) = documents(folder / "service.yaml")
    (workload,) = documents(folder / "statefulset.yaml")
    (monitor,) = documents(folder / "servicemonitor.yaml")
    (listed,) = documents(folder / "kustomization.yaml")
    container = workload["spec"]["template"]["spec"]["containers"][0]
    assert service["spec"]["selector"] == workload["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    deployment, scaler, budget = documents(folder.parent / "cluster" / "deployment.yaml")
    pod, other = workload["spec"]["template"], deployment["spec"]["template"]
    assert (other["metadata"], deployment["metadata"]) == (pod["metadata"], workload["metadata"])
    different = {"image": 0, "envFrom": 0, "volumeMounts": 0}
    assert other["spec"]["containers"][0] | different == container | different
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert budget["spec"]["selector"] == deployment["spec"]["selector"] == workload["spec"]["selector"]
    claims = {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    volumes = {volume["name"] for volume in workload["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claims | volumes
    assert all((folder / name).exists() for name in listed["resources"])


def test_the_pod_lives_through_its_drain() -> None:
    """preStop, the drain, the forced exit after it, and the close of connections, in this order."""
    (workload,) = documents(DOCKER / "deploy" / "kubernetes" / "statefulset.yaml")
    pod = workload["spec"]["template"]["spec"]
    command, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    ends = ServerConfig().shutdown_timeout + LAST_SECONDS + CLOSE_SECONDS
    assert command == "sleep" and 5 <= int(seconds) <= pod["terminationGracePeriodSeconds"] - ends
    (compose,) = documents(DOCKER / "compose.yaml")
    assert int(compose["services"]["tidemill"]["stop_grace_period"].removesuffix("s")) >= ends
    unit = (DOCKER / "deploy" / "tidemill.service").read_text()
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) >= ends


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_renders_the_model_the_image_and_the_limits() -> None:
    import kubernetes_validate

    command = ["kubectl", "kustomize", str(DOCKER / "deploy" / "kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rendered = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    for document in rendered.values():
        kubernetes_validate.validate(document, "1.34", strict=True)
    pod = rendered["StatefulSet"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"] == "registry.example.com/tidemill:gpu"
    assert container["envFrom"][0]["configMapRef"]["name"] == rendered["ConfigMap"]["metadata"]["name"]
    assert set(rendered["ConfigMap"]["data"]) == {"TIDEMILL_MODEL", "TIDEMILL_SLO"}
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 20 * 60
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/dev/shm", "/models", "/tmp"}
    assert "memory" in container["resources"]["requests"]


@pytest.mark.parametrize("name", ["kubernetes/service", "kubernetes/statefulset", "cluster/deployment"])
def test_each_manifest_keeps_the_schema_of_kubernetes(name: str) -> None:
    import kubernetes_validate

    for document in documents(DOCKER / "deploy" / f"{name}.yaml"):
        kubernetes_validate.validate(document, "1.34", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document | {"specs": {}}, "1.34", strict=True)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cluster.yaml"])
def test_compose_gives_settings_that_the_server_takes(name: str) -> None:
    (compose,) = documents(DOCKER / name)
    service = compose["services"]["tidemill"]
    environment: dict[str, Any] = service["environment"]
    flags = {flag.variable for kind in (EngineConfig, ServerConfig) for flag in flags_of(kind)}
    ours = {variable for variable in environment if variable.startswith("TIDEMILL_")}
    assert {"TIDEMILL_API_KEY", "TIDEMILL_MODEL", "TIDEMILL_SLO"} <= ours <= flags and "HF_TOKEN" in environment
    given = {variable: environment[variable] or "" for variable in ours}
    configs = resolve_configs(_parser().parse_args(service["command"]), (EngineConfig, ServerConfig), given)
    check_combinations(*configs)
    place = find_state(configs[1].state_dir)
    if name == "compose.yaml":
        assert place.database is None
        return
    database, objects = urlsplit(place.database or ""), urlsplit(place.objects or "")
    assert database.hostname and objects.scheme == "s3"
    postgres, minio = compose["services"][database.hostname], compose["services"]["minio"]
    made = postgres["environment"]
    assert (database.username, database.path) == (made["POSTGRES_USER"], f"/{made['POSTGRES_DB']}")
    assert urlsplit(environment["AWS_ENDPOINT_URL"]).netloc == "minio:9000"
    assert f"mkdir -p /data/{objects.netloc} " in minio["entrypoint"][-1] and "minio:/data" in minio["volumes"]
    assert environment["AWS_ACCESS_KEY_ID"] == minio["environment"]["MINIO_ROOT_USER"]
    passwords = {environment["PGPASSWORD"], environment["AWS_SECRET_ACCESS_KEY"], made["POSTGRES_PASSWORD"]}
    assert passwords == {minio["environment"]["MINIO_ROOT_PASSWORD"]}
    assert set(service["depends_on"]) == {database.hostname, "minio"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus has promtool")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    shutil.copytree(DOCKER / "prometheus", tmp_path / "prometheus")
    config = tmp_path / "prometheus" / "prometheus.yml"
    config.write_text(config.read_text().replace("/tmp/key", str(tmp_path / "key")))
    (tmp_path / "key").write_text("k")
    done = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """But for the command, which is installed where the unit is; `notify`, since the server says when it serves."""
    text = (DOCKER / "deploy" / "tidemill.service").read_text()
    assert "\nType=notify\n" in text and "\nRestartPreventExitStatus=2\n" in text  # a ConfigError
    assert "/bin/kill" not in text  # of a package that a minimal Debian has not
    unit = tmp_path / "tidemill.service"
    unit.write_text(text.replace("/opt/tidemill/bin/tidemill", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "tidemill" not in done.stdout + done.stderr, done.stderr


def links_of(service: dict[str, Any]) -> dict[str, str]:
    """The variables that the kubelet gives to the pods of a Service's namespace."""
    name = service["metadata"]["name"].upper().replace("-", "_")
    (port, *_), address = service["spec"]["ports"], "10.96.0.12"
    number, url = str(port["port"]), f"tcp://{address}:{port['port']}"
    own = f"{name}_PORT_{number}_TCP"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": number,
        f"{name}_SERVICE_PORT_{port['name'].upper()}": number,
        f"{name}_PORT": url,
        own: url,
        f"{own}_PROTO": "tcp",
        f"{own}_PORT": number,
        f"{own}_ADDR": address,
    }


SERVICES = [
    (f"{path.parent.name}/{document['metadata']['name']}", document)
    for path in sorted((DOCKER / "deploy").rglob("*.yaml"))
    for document in documents(path)
    if document.get("kind") == "Service"
]


@pytest.mark.parametrize("service", [document for _, document in SERVICES], ids=[name for name, _ in SERVICES])
@pytest.mark.parametrize("in_env", [True, False], ids=["manifest", "own manifest"])
def test_the_links_of_services_are_no_settings(service: dict[str, Any], in_env: bool) -> None:
    flags = [flag for kind in (EngineConfig, ServerConfig) for flag in flags_of(kind)]
    environment = links_of(service) | {"TIDEMILL_REDIS_SERVICE_HOST": "10.0.0.1", "TIDEMILL_REDIS_PORT": "tcp://x:1"}
    for name in ("kubernetes/statefulset", "cluster/deployment"):
        pod = documents(DOCKER / "deploy" / f"{name}.yaml")[0]["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        given = {each["name"]: each["value"] for each in pod["containers"][0]["env"] if "value" in each}
        assert given["TIDEMILL_PORT"] == "8000" == str(service["spec"]["ports"][0]["port"])
        given = environment | (given if in_env else {})
        _, server = resolve_configs(_parser().parse_args(["serve"]), (EngineConfig, ServerConfig), given)
        assert server.port == 8000 and not unknown_variables(flags, given)


def test_unknown_variables_are_named() -> None:
    flags = [flag for kind in (EngineConfig, ServerConfig) for flag in flags_of(kind)]
    given = {"TIDEMILL_SLOO": "x", "TIDEMILL_QQQQQQQQQ": "1", "TIDEMILL_SLO": "x", "TIDEMILL_URL": "x", "OTHER": "x"}
    unknown, typed = unknown_variables(flags, given)
    assert unknown == "TIDEMILL_QQQQQQQQQ is unknown and has no effect"
    assert typed == "TIDEMILL_SLOO is unknown and has no effect; did you mean TIDEMILL_SLO?"


def test_the_unit_lets_several_ranks_and_gpus_work() -> None:
    unit = (DOCKER / "deploy" / "tidemill.service").read_text()
    assert "AF_NETLINK" in re.findall(r"^RestrictAddressFamilies=(.*)$", unit, re.MULTILINE)[0].split()
    assert re.search(r"^ExecStartPre=-\+/usr/bin/nvidia-modprobe -c 0 -u$", unit, re.MULTILINE)
    assert "DeviceAllow" not in unit and "PrivateDevices" not in unit, "or the device files would be out of reach"
