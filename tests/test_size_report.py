"""The report of sizes that `make check` prints."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("size_report", ROOT / "tools" / "size_report.py")
assert SPEC is not None and SPEC.loader is not None
report = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(report)


def test_the_report_names_long_functions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine").mkdir()
    long = "def f() -> None:\n" + "    pass\n" * report.FUNCTION_LIMIT
    (tmp_path / "engine" / "a.py").write_text(long)
    monkeypatch.setattr(report, "tracked", lambda _pattern: [Path("engine/a.py")])
    assert report.main() == 0
    assert f"{report.FUNCTION_LIMIT + 1} lines  engine/a.py:1 f" in capsys.readouterr().out


def test_a_feature_beyond_its_cap_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "features.toml"
    monkeypatch.setattr(report, "FEATURES", page)
    monkeypatch.setattr(report, "tracked", lambda _pattern: [])
    monkeypatch.setattr(report, "closure", lambda _module: [])
    for cap, status in ((1000, 0), (10, 1)):
        page.write_text(f'[[feature]]\nname = "sizes"\nfiles = ["tools/size_report.py"]\ncap = {cap}\n')
        assert report.main() == status
        assert ("sizes:" in capsys.readouterr().out) == bool(status)
