"""A clock that jumped deletes nothing: of one server alone, and of one in a cluster."""

from pathlib import Path

import pytest
from batch_tools import add_batch, add_file, batch_worker, eventually, jsonl, line

from gateway.store.objects import BatchStatus
from gateway.store.row_store import GRACE_SECONDS, JUMP_SECONDS, StoreClock

DAY, START = 86_400, 2_000_000_000


class Clocks:
    """The system's clock and the time that really passes."""

    def __init__(self) -> None:
        self.wall, self.elapsed = float(START), 5.0
        self.store = StoreClock(lambda: self.wall, lambda: self.elapsed)

    def pass_time(self, seconds: float) -> None:
        self.wall, self.elapsed = self.wall + seconds, self.elapsed + seconds


@pytest.mark.parametrize(
    ("newest", "jump", "waits", "right"),
    [
        (START - 60, 0, 60, START + 60),
        (START - 60, 3600, 60, START + 3660),  # within a day: followed at once
        (START - 60, 31 * DAY, 60, START + 60),  # the newest time, and the time that has passed
        (START - 60, 31 * DAY, GRACE_SECONDS + 1, START + 31 * DAY + GRACE_SECONDS + 1),
        (START - 60, -31 * DAY, 60, START - 31 * DAY + 60),
        (None, 0, 60, START + 60),
        (START - 9 * DAY, 0, 60, START - 9 * DAY + 60),  # stopped for days, or a wrong clock at the start
        (START + 9 * DAY, 0, 60, START + 60),
    ],
)
def test_a_jump_needs_an_hour(newest: int | None, jump: int, waits: int, right: int) -> None:
    clocks = Clocks()
    assert clocks.store.expiry_now() == 0, "nothing expires before the comparison"
    clocks.store.begin(newest)
    clocks.wall += jump
    clocks.store.expiry_now()
    clocks.pass_time(waits)
    assert clocks.store.expiry_now() == right
    assert clocks.store.now() == clocks.wall


def test_a_jump_that_is_taken_back_leaves_no_doubt(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    clocks.store.begin(START)
    for _ in range(2):
        clocks.wall += JUMP_SECONDS + 2
        assert clocks.store.expiry_now() == START
        clocks.pass_time(GRACE_SECONDS - 1)
        clocks.wall = START + clocks.elapsed - 5.0
        assert clocks.store.expiry_now() == clocks.wall
        clocks.store.begin(START)
        clocks.wall, clocks.elapsed = START, 5.0
        clocks.store.begin(START)
    assert caplog.text.count("nothing expires by it") == 2


def test_the_clock_of_the_database_is_that_of_all_servers() -> None:
    clocks = Clocks()
    clocks.wall += 31 * DAY
    clocks.store.follow(START)
    clocks.store.begin(START - 60)
    clocks.pass_time(100)
    clocks.wall -= 90 * DAY
    assert clocks.store.now() == clocks.store.expiry_now() == START + 100


async def test_a_server_whose_clock_is_wrong_deletes_no_file_and_expires_no_batch(tmp_path: Path) -> None:
    clock = [float(START)]
    async with batch_worker(tmp_path, clock=lambda: clock[0]) as worker:
        file = await add_file(worker._folder, b"x\n")
        await worker._store._writer.run(lambda c: c.execute("UPDATE files SET created_at = ?", (START,)))
        clock[0] += 31 * DAY
        batch = await add_batch(worker._folder, jsonl([line(1)]), START)
        await worker.start()
        await worker.tick()
        await eventually(lambda: not worker.states)
        assert (await worker._store.load_batch(batch.id)).status is BatchStatus.COMPLETED
        assert await worker._store.get_file(None, file.id, worker.clock.expiry_now()) is not None
        assert (tmp_path / "files" / file.id).exists()
