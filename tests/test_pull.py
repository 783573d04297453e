"""`tidemill pull` against a server that speaks the hub's endpoints: sizes, resume, refusals, offline."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hub_server
import huggingface_hub
import pytest
import tiny_models
from hub_server import COMMIT, Hub
from huggingface_hub.errors import OfflineModeIsEnabled

from engine.build import local_config, resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.models import hub as models_hub
from engine.models.hub import resolve_model_folder
from tidemill import cli

NAME = "acme/small"
WEIGHTS = bytes(range(256)) * 8192  # 2 MiB: several pieces of the library's


def repository(**more: bytes) -> dict[str, bytes]:
    config = json.dumps(tiny_models.llama_config()).encode()
    files = {"config.json": config, "tokenizer.json": b"{}", "README.md": b"not wanted", "model.safetensors": WEIGHTS}
    return files | more


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server.serve(Hub(NAME, repository())) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--acme--small" / "snapshots" / COMMIT


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence on stderr of a pull that ends with 2."""
    assert cli.main(["pull", *argv]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("tidemill: ")
    return err.removeprefix("tidemill: ")


def test_sizes_come_first_and_only_what_is_served_is_fetched(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pull", NAME]) == 0
    out = capsys.readouterr().out
    assert "3, 2 MiB in all, 2 MiB to download" in out and "weights 2 MiB of " in out and " free at " in out
    assert out.index("to download") < out.index("is in") and "next: tidemill serve acme/small" in out
    folder = folder_of(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert resolve_model_folder(NAME) == folder

    hub.ranges.clear()
    assert cli.main(["pull", NAME, "--revision", COMMIT]) == 0
    out = capsys.readouterr().out
    assert "all downloaded" in out and f"next: tidemill serve {NAME} --revision {COMMIT}" in out
    assert hub.ranges == [], "nothing is fetched twice"


def test_a_cut_connection_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 65536)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [])  # pytest has closed their output
    hub.cut_after["model.safetensors"] = 700_000
    assert cli.main(["pull", NAME]) == 0
    assert (folder_of(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    asked = [wanted for name, wanted in hub.ranges if name == "model.safetensors"]
    assert asked[0] is None and len(asked) == 2
    assert asked[1] is not None and 0 < int(asked[1].removeprefix("bytes=").rstrip("-")) <= 700_000


def test_a_pull_that_was_ended_goes_on_with_what_is_missing(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files["model-2.safetensors"] = WEIGHTS[::-1]
    hub.broken.add("model-2.safetensors")
    assert hub.url in refused(capsys, NAME)
    hub.broken.clear()
    hub.ranges.clear()
    assert cli.main(["pull", NAME]) == 0
    assert "4 MiB in all, 2 MiB to download" in capsys.readouterr().out
    assert [name for name, _ in hub.ranges] == ["model-2.safetensors"]


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        ((401, "GatedRepo"), "is gated; accept its licence at {url}/acme/small, then run hf auth login and tidemill"),
        ((403, "GatedRepo"), "is gated; accept its licence at"),
        ((401, "RepoNotFound"), "{url} has no model acme/small, or it is private; check the name, or run hf auth"),
        ((404, "RepoNotFound"), "{url} has no model acme/small, or it is private"),
        ((500, "Oops"), "download of acme/small from {url} failed"),
    ],
)
def test_each_refusal_is_one_sentence(
    hub: Hub, refuse: tuple[int, str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuse = refuse
    assert words.format(url=hub.url) in refused(capsys, NAME)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model_folder(NAME)
    assert "\n" not in caught.value.message


def test_a_revision_that_is_not_there(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, NAME, "--revision", "v9")
    assert text == "acme/small has no revision v9; tidemill pull acme/small takes the newest"


def test_a_revision_is_served_as_it_was_pulled(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=NAME, revision="main")
    assert local_config(config) is None
    assert cli.main(["serve", NAME, "--revision", "v9", "--dry-run", "--port", "0"]) == 0
    assert "`tidemill pull acme/small --revision v9` shows its size" in capsys.readouterr().out
    with pytest.raises(ModelLoadError, match="has no revision v9; tidemill pull acme/small takes the newest"):
        resolve_model(replace(config, revision="v9"))
    assert resolve_model(config) == folder_of(tmp_path)
    assert resolve_model(replace(config, revision=COMMIT)) == folder_of(tmp_path)
    local = local_config(config)
    assert local is not None and local.revision is None and local.model == str(folder_of(tmp_path))


@pytest.mark.parametrize(("model", "words"), [("", "name a MODEL"), ("FOLDER", "is a folder")])
def test_a_revision_of_what_is_not_from_the_hub(tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match=f"--revision .*hub.*{words}"):
        resolve_model(EngineConfig(model=model.replace("FOLDER", str(tmp_path)), revision="main"))


def test_an_unreachable_hub(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "no connection to http://127.0.0.1:1 (" in refused(capsys, NAME)


def test_offline(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OfflineModeIsEnabled("no")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    text = refused(capsys, NAME)
    assert "is not on this machine and HF_HUB_OFFLINE forbids downloads; run HF_HUB_OFFLINE=0 tidemill pull" in text
    monkeypatch.undo()


def test_offline_with_all_of_it_here(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OfflineModeIsEnabled("no")

    assert cli.main(["pull", NAME]) == 0
    hub.refuse = (500, "the network must not be used")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    capsys.readouterr()
    assert cli.main(["pull", NAME]) == 0
    assert "all downloaded" in capsys.readouterr().out
    assert models_hub.cached_folder(NAME) == folder_of(tmp_path)


def test_pickles_are_refused_before_anything_is_fetched(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    del hub.files["model.safetensors"]
    hub.files["pytorch_model.bin"] = WEIGHTS
    assert "only pickled weights (.bin), which can run code" in refused(capsys, NAME)
    assert hub.ranges == []
    del hub.files["pytorch_model.bin"]
    assert "has no safetensors weights" in refused(capsys, NAME)


def test_a_model_that_cannot_be_served_is_not_fetched(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files["config.json"] = json.dumps({"model_type": "mystery", "architectures": ["Mystery"]}).encode()
    assert "ystery" in refused(capsys, NAME)
    assert {name for name, _ in hub.ranges} == {"config.json"}
    assert models_hub.cached_folder(NAME) is None, "a part of a model is no model"


def test_a_disk_that_is_too_small(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    text = refused(capsys, NAME)
    assert text.startswith("acme/small needs 2 MiB more, and ") and "has 1 MiB free; free space or run HF_HOME=" in text
    assert {name for name, _ in hub.ranges} == {"config.json"}


@pytest.mark.parametrize("name", ["small", "a/b/c", "./small"])
def test_what_is_no_id(hub: Hub, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a Hugging Face id (owner/name)" in refused(capsys, name)
    assert "nor a valid id" in refused(capsys, "ac me/small")
