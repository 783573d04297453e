"""Which level of the native kernels runs; `test_runner` and `test_hybrid_cache` run steps by them."""

from pathlib import Path

import pytest
import torch
from native_build import native_library

from engine.errors import ConfigError
from engine.execution.cpu.native.library import Level, Library
from engine.execution.cpu.native.linear import Native, NativeLinear
from engine.execution.cpu.native.start import start

pytestmark = pytest.mark.timeout(900)  # the first test may have to build the library


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_highest_level_that_is_right_is_taken(dtype: torch.dtype) -> None:
    found = start(2, dtype, native_library())
    assert isinstance(found, Native)
    assert found.level == min(found.level_for(dtype), max(native_library().levels()))


def test_a_level_that_answers_otherwise_than_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = NativeLinear.op

    def wrong(self: NativeLinear, *words: object) -> object:
        op = right(self, *words)  # type: ignore[arg-type]
        if self.native.level > Level.AVX2 and self.out_features == 80:
            op.bias = self.panels.data_ptr()
        return op

    monkeypatch.setattr(NativeLinear, "op", wrong)
    found = start(1, torch.float32, native_library())
    assert isinstance(found, Native) and found.level is Level.AVX2
    above = [level for level in native_library().levels() if Level.AVX2 < level <= Level.AVX512]
    assert caplog.text.count("are not used") == len(above), "those for bfloat16 are none of a float32 model"


def test_without_a_library_the_reason_is_given() -> None:
    assert start(2, torch.float32, "it was not built") == "it was not built"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(b"nothing")
    with pytest.raises((OSError, ConfigError)):
        Library(path)
