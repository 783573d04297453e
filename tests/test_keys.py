"""Keys: the file, its rights, tenants and tiers, and their effect on a server."""

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import batch_server, digest, key_file
from fake_engine import colocation_stats
from support.tables import for_each

from engine.client import EngineStats
from engine.errors import ConfigError
from engine.text.tokenizer import Tokenizer
from gateway.config import ServerConfig
from gateway.http.keys import KeyRing, key_of, load_keys
from tidemill.commands import preflight


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = key_file(
        tmp_path,
        "# keys of two tenants",
        "",
        f"{digest('a')} acme",
        f"  {digest('b').upper()}  acme   flex  # the batch key",
        f"{digest('ünï')} other.one default",
    )
    ring = load_keys(["direct"], path)
    found = [ring.find(key.encode()) for key in ("a", "b", "ünï", "direct")]
    assert [(k.tenant, k.service_tier) for k in found if k] == [
        ("acme", "default"), ("acme", "flex"), ("other.one", "default"), ("default", "default"),
    ]  # fmt: skip
    for wrong in (b"", b"A", b"a ", b"\xff" * 1_000_000, digest("a").encode()):
        assert ring.find(wrong) is None
    assert ring and not KeyRing([]) and load_keys([], None).find(b"") is None


@for_each(
    ("words", "tier", "sees_all", "is_operator"),
    [
        ("", "default", False, False),
        ("metrics", "default", True, False),
        ("flex metrics", "flex", True, False),
        ("metrics flex", "flex", True, False),
        ("operator", "default", True, True),
        ("operator flex", "flex", True, True),
        ("metrics default operator", "default", True, True),
    ],
)
@for_each("tenant", ["metrics", "operator", "default"])
def test_the_role_of_a_key(
    tmp_path: Path, tenant: str, words: str, tier: str, sees_all: bool, is_operator: bool
) -> None:
    ring = load_keys([], key_file(tmp_path, f"{digest('a')} {tenant} {words} requests=3", f"{digest('b')} acme"))
    key = ring.find(b"a")
    assert key is not None and (key.tenant, key.service_tier) == (tenant, tier)
    assert (ring.sees_all(key), key.is_operator, ring.has_operator) == (sees_all, is_operator, is_operator)


def test_keys_of_the_command_line_are_one_tenant_and_operators_without_a_key_file(tmp_path: Path) -> None:
    ring = load_keys(["one", "two"], None)
    keys = [ring.find(text) for text in (b"one", b"two")]
    assert [(key.tenant, key.sees_all, key.is_operator) for key in keys if key] == [("default", True, True)] * 2
    path = key_file(tmp_path, f"{digest('a')} acme", f"{digest('two')} default flex", f"{digest('b')} default lines=9")
    ring = load_keys(["one", "two"], path)
    keys = [ring.find(text) for text in (b"one", b"two", b"b")]
    assert [(key.tenant, key.service_tier, key.sees_all) for key in keys if key] == [
        ("default", "default", True), ("default", "flex", False), ("default", "default", False),
    ]  # fmt: skip
    assert not ring.has_operator and ring.tenants == {"acme", "default"} and ring.quota("default").lines == 9
    assert KeyRing([]).has_operator and KeyRing([]).tenants == {"default"}


async def test_no_tenant_sees_the_figures_of_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [f"{digest('a')} acme", f"{digest('b')} operator", f"{digest('m')} boss metrics"]

    async def seen(*lines: str, **config: Any) -> dict[str | None, tuple[int, bool]]:
        file = key_file(tmp_path, *lines) if lines else None
        async with batch_server(tokenizer, tmp_path / "state", api_key_file=file, **config) as (served, _):
            served.engine.snapshot = EngineStats(colocation=colocation_stats())
            found: dict[str | None, tuple[int, bool]] = {}
            async with httpx.AsyncClient(timeout=60, base_url=served.url) as client:
                for key in (None, "a", "b", "m", "direct"):
                    headers = {} if key is None else {"authorization": f"Bearer {key}"}
                    ready = await client.get("/ready", headers=headers)
                    metrics = await client.get("/metrics", headers=headers)
                    assert ready.status_code == 200 and ("tidemill_slo" in metrics.text) == (metrics.status_code == 200)
                    found[key] = (metrics.status_code, "slo" in ready.text)
            return found

    shown, hidden, unknown = (200, True), (403, False), (401, False)
    assert await seen(*lines) == {None: unknown, "a": hidden, "b": hidden, "m": shown, "direct": unknown}
    assert await seen(lines[0]) == {None: unknown, "a": shown, "b": unknown, "m": unknown, "direct": unknown}
    found = await seen(*lines, api_key=("direct",))
    assert found == {None: unknown, "a": hidden, "b": hidden, "m": shown, "direct": shown}
    assert await seen() == dict.fromkeys((None, "a", "b", "m", "direct"), shown)


def test_only_digests_are_kept() -> None:
    assert "secret" not in repr(key_of("secret"))


@pytest.mark.parametrize(
    ("mode", "own_group", "answer"),
    [
        (0o600, True, ""),
        (0o400, True, ""),
        (0o440, True, ""),  # a Secret with fsGroup
        (0o660, True, ""),  # another volume with fsGroup
        (0o444, True, "any user can read"),  # a Secret, Compose
        (0o644, False, "any user can read"),
        (0o640, False, ""),
        (0o660, False, "other users can write it; run chmod go-w"),
        (0o602, True, "other users can write it"),
        (0o666, True, "other users can write it"),
    ],
)
def test_the_mode_of_a_key_file(
    tmp_path: Path,
    mode: int,
    own_group: bool,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the kubelet mounts a Secret: a link into `..data`, which is a link to a folder."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..data").symlink_to("..2026")
    key_file(tmp_path / "..data", f"{digest('a')} acme", mode=mode)
    (tmp_path / "tenants").symlink_to("..data/keys")
    group = (tmp_path / "tenants").stat().st_gid
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [group] if own_group else [])
    try:
        preflight._check_keys(ServerConfig(api_key_file=str(tmp_path / "tenants")), ["default"])
    except ConfigError as error:
        assert answer in error.message and answer
    else:
        out = capsys.readouterr().out
        assert (answer in out) if answer else not out


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["plain-key acme"], "line 1: expected a SHA-256"),
        ([f"{digest('a')}"], "line 1"),
        ([f"{digest('a')} acme gold"], "line 1"),
        ([f"{digest('a')} acme flex more"], "line 1"),
        ([f"{digest('a')} acme metrics metrics"], "line 1"),
        ([f"{digest('a')} acme operator operator"], "line 1"),
        ([f"{digest('a')} acme flex default"], "line 1"),
        ([f"{digest('a')} *"], "line 1"),
        (["", f"{digest('a')} ac/me"], "line 2"),
        ([f"{digest('a')} " + "x" * 65], "line 1"),
        ([f"{digest('a')} t", f"{digest('a')} u"], "line 2: duplicate key"),
        (["# nothing"], "contains no keys"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_keys([], key_file(tmp_path, *lines))
    assert says in caught.value.message and "\n" not in caught.value.message
    assert "plain-key" not in caught.value.message, "a key that was written down by mistake is not repeated"


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="--api-key-file"):
            load_keys([], str(path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="not a text file"):
        load_keys([], str(tmp_path / "binary"))


def test_any_address_needs_keys_of_one_kind() -> None:
    with pytest.raises(ConfigError):
        ServerConfig(host="0.0.0.0")
    assert ServerConfig(host="0.0.0.0", api_key_file="keys").host == "0.0.0.0"
