"""Where a user without a home folder, a read-only root or a missing temporary folder keeps caches and state."""

import os
import tempfile
from pathlib import Path

import pytest

from engine.build import profile_folder
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.machine.folders import adopt, user_folder
from gateway.store.folder import state_path
from tidemill.commands import models


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a process with any uid: no HOME, no entry in /etc/passwd."""
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_the_default_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # invalid by the specification
    assert user_folder("cache", "x") == Path("/home/a/.cache/tidemill")
    assert state_path(None) == Path("/home/a/.local/state/tidemill") and state_path("~/s") == Path("/home/a/s")
    for variable, kind in (("XDG_CACHE_HOME", "cache"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(variable, "/x")
        assert user_folder(kind, "x") == Path("/x/tidemill")


def test_without_a_home_folder_the_error_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    without_home(monkeypatch)
    for home in (None, "relative"):
        if home is not None:
            monkeypatch.setenv("HOME", home)
        with pytest.raises(ConfigError, match="set --state-dir to a folder"):
            state_path(None)
        with pytest.raises(ConfigError, match="set --profile-dir to a folder"):
            profile_folder(EngineConfig())
        with pytest.raises(ConfigError, match="set HF_HOME to a folder"):
            models.pull("owner/name", None, print)
    monkeypatch.delenv("HOME")
    with pytest.raises(ConfigError, match="--state-dir ~/s: this user has no home folder"):
        state_path("~/s")
    assert state_path("/s") == Path("/s") and profile_folder(EngineConfig(profile_dir="/p")) == Path("/p")


@pytest.mark.parametrize("has_temporary", [True, False])
@pytest.mark.parametrize("cache_home", [None, "/c"])
@pytest.mark.parametrize(("home", "writable"), [("/home/a", True), ("/", False), (None, True)])
def test_the_state_folder_takes_what_has_no_other_place(
    monkeypatch: pytest.MonkeyPatch, home: str | None, writable: bool, cache_home: str | None, has_temporary: bool
) -> None:
    without_home(monkeypatch)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "access", lambda *_: writable)
    monkeypatch.setattr(tempfile, "tempdir", "/t" if has_temporary else None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    environment = {} if cache_home is None else {"XDG_CACHE_HOME": cache_home}
    expected = dict(environment)
    if home != "/home/a":
        expected |= {"HOME": "/s/cache", "XDG_CACHE_HOME": cache_home or "/s/cache"}
    if not has_temporary:
        expected |= {"TMPDIR": "/s/cache"}
    adopts = len(expected) > len(environment)
    assert adopt(Path("/s"), environment) == (Path("/s/cache") if adopts else None)
    assert environment == expected and tempfile.gettempdir() == ("/t" if has_temporary else "/s/cache")
