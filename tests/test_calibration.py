"""The latency profile: measured on a runner, kept, read again, refused when damaged or foreign."""

from pathlib import Path

import pytest
from driver import Driver, make_request

from engine.calibration import load_or_measure, load_profile, measure_profile
from engine.config import SchedulerConfig
from engine.execution.fake import FakeRunner
from engine.scheduling.output import ModelRunnerOutput, SchedulerOutput
from engine.virtual import step_features
from predictor.model import LatencyModel
from predictor.profile import ProfileError, ProfileKey
from predictor.sweep import SweepLimits

TRUTH = LatencyModel(intercept=0.004, decode_context=2e-6, prefill_chunks=1e-4, knots=(0, 64), hinges=(1e-5, 1e-4))
LIMITS = SweepLimits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=256, num_units=2 * 200, block_size=16)
KEY = ProfileKey("model", "device", "float32", "1")


class TimedRunner(FakeRunner):
    """Claims what a known law says, and checks every step like any fake runner."""

    def __init__(self) -> None:
        super().__init__(block_size=16, vocab_size=50, latency=lambda output: TRUTH.predict(step_features(output)))

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The sweep reads cells that nobody wrote: only the shape of a step is checked."""
        assert all(chunk.start + chunk.length <= LIMITS.max_model_len for chunk in output.chunks)
        units = [u for new in output.new_requests for entry in new.entries for u in entry.units]
        assert len(units) == len(set(units)) and all(u < LIMITS.num_units for u in units)
        latency = self._latency(output)
        return ModelRunnerOutput(output.step_id, [1] * sum(c.sample for c in output.chunks), None, latency)


def test_a_sweep_recovers_the_law_of_the_device() -> None:
    calibration = measure_profile(TimedRunner(), LIMITS, 50, KEY, seconds=5.0)
    assert calibration.mape["full"] < 0.02
    assert calibration.profile.num_samples > 30
    assert calibration.train and calibration.held_out


def test_a_real_runner_is_idle_again_afterwards() -> None:
    class Lenient(FakeRunner):
        def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
            if output.step_id < 10_000 and not self.serving:
                return ModelRunnerOutput(output.step_id, [1] * len(output.chunks), None, 0.01)
            return super().execute(output)

        serving = False

    runner = Lenient(block_size=16, vocab_size=50)
    measure_profile(runner, LIMITS, 50, KEY, seconds=0.1)
    runner.serving = True
    driver = Driver(runner, SchedulerConfig(num_units=400, max_model_len=256))
    driver.add(make_request("a", range(20), 5))
    driver.run()


def test_measured_once_then_read(tmp_path: Path) -> None:
    said: list[str] = []
    first = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 2.0, said.append)
    again = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 2.0, said.append)
    assert again == first
    assert [line.split(" ")[0] for line in said] == ["measuring", "latency", "latency"]


def test_a_damaged_profile_is_said_and_measured_again(tmp_path: Path) -> None:
    path = tmp_path / KEY.filename()
    path.write_text('{"schema": 1, "key"')
    with pytest.raises(ProfileError, match="damaged"):
        load_profile(tmp_path, KEY, LIMITS)
    said: list[str] = []
    load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 1.0, said.append)
    assert "damaged" in said[0]
    assert load_profile(tmp_path, KEY, LIMITS) is not None


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    other = ProfileKey("other", "device", "float32", "1")
    calibration = measure_profile(TimedRunner(), LIMITS, 50, other, seconds=0.5)
    calibration.profile.save(tmp_path / KEY.filename())
    with pytest.raises(ProfileError, match="made for model 'other', not 'model'"):
        load_profile(tmp_path, KEY, LIMITS)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    load_or_measure(tmp_path / "file" / "below", TimedRunner(), LIMITS, 50, KEY, 0.5, said.append)
    assert "could not be kept" in said[-1]


def test_no_seconds_measure_one_step_and_keep_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    profile = load_or_measure(tmp_path, TimedRunner(), LIMITS, 50, KEY, 0.0, said.append)
    assert profile.num_samples >= 1 and not list(tmp_path.iterdir())
