"""What the main thread says it is doing, and how another process reads it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from craft.protocol.values.activity import Doing, Phase
from craft.wire.activity import SLOT, SLOT_OFFSETS, ActivityReader, memory_folder, read
from craft.worker.report.activity_page import ActivityPage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "activity"


@pytest.fixture
def activity(path: Path) -> Iterator[ActivityPage]:
    activity = ActivityPage(path)
    yield activity
    activity.close()


def seen(path: Path) -> Doing:
    doing = read(path)
    assert doing is not None
    return doing


def test_a_worker_begins_by_starting(activity: ActivityPage, path: Path) -> None:
    doing = seen(path)

    assert (doing.phase, doing.step, doing.microbatch, doing.commits) == (Phase.STARTING, None, None, 0)
    assert doing.longest == (None,) * len(Phase)
    assert doing.beat is None


def test_a_reader_sees_phase_step_microbatch_and_commits(activity: ActivityPage, path: Path) -> None:
    activity.now(Phase.LOADING, 41, 3)
    activity.committed()
    activity.now(Phase.COMPUTING, microbatch=4)

    doing = seen(path)

    assert (doing.phase, doing.step, doing.microbatch, doing.commits) == (Phase.COMPUTING, 41, 4, 1)
    assert doing.changes == 2


def test_the_time_is_that_of_the_change(activity: ActivityPage, path: Path) -> None:
    began = seen(path).since
    activity.now(Phase.COMPUTING, 1)
    first = seen(path)

    assert seen(path) == first
    assert first.since >= began
    assert first.longest[Phase.STARTING] == pytest.approx(first.since - began)


def test_of_each_phase_the_longest_duration_is_kept_and_fades(activity: ActivityPage, path: Path) -> None:
    def spend(seconds: float) -> None:
        activity.now(Phase.COMPUTING)
        activity._since -= seconds
        activity.now(Phase.LOADING)

    spend(100.0)
    spend(1.0)
    assert seen(path).longest[Phase.COMPUTING] == pytest.approx(98, abs=0.1)

    for _ in range(300):
        spend(1.0)
    assert seen(path).longest[Phase.COMPUTING] == pytest.approx(1.0, abs=0.1)

    spend(5.0)
    assert seen(path).longest[Phase.COMPUTING] == pytest.approx(5.0, abs=0.1)


def test_a_pause_has_a_reason_and_ends_where_it_began(activity: ActivityPage, path: Path) -> None:
    activity.now(Phase.UPDATING, 7)

    with activity.paused("evaluation"):
        assert (seen(path).phase, seen(path).step, seen(path).reason) == (Phase.PAUSED, 7, "evaluation")
        with activity.paused("über " * 50):
            assert seen(path).reason == ("über " * 50).encode()[:64].decode(errors="ignore").rstrip("\0")
        assert (seen(path).phase, seen(path).reason) == (Phase.PAUSED, "evaluation")

    assert (seen(path).phase, seen(path).step, seen(path).reason) == (Phase.UPDATING, 7, "")


def test_a_pause_ends_also_by_an_exception(activity: ActivityPage, path: Path) -> None:
    activity.now(Phase.COMPUTING, 7, 2)

    with pytest.raises(KeyError), activity.paused("lookup"):
        raise KeyError

    assert (seen(path).phase, seen(path).microbatch) == (Phase.COMPUTING, 2)


def test_a_beat_is_seen_without_a_change_of_phase(activity: ActivityPage, path: Path) -> None:
    before = seen(path)
    activity.beat()
    after = seen(path)

    assert after.beat is not None and after.beat >= before.since
    assert after.changes == before.changes


def test_outside_of_craft_run_nothing_is_written(tmp_path: Path) -> None:
    activity = ActivityPage(None)
    activity.now(Phase.COMPUTING, 1, 2)
    activity.committed()
    activity.beat()
    with activity.paused("evaluation"):
        pass
    activity.close()

    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to_does_not_stop_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    activity = ActivityPage(tmp_path / "missing" / "activity")
    activity.now(Phase.COMPUTING)

    assert "will not be detected" in caplog.text


@pytest.mark.parametrize("content", [b"", b"x" * 10, bytes(256), b"\xff" * 256])
def test_what_is_not_there_or_not_whole_is_nothing(path: Path, content: bytes) -> None:
    assert read(path) is None
    path.write_bytes(content)
    assert read(path) is None


def test_a_reader_that_came_too_early_finds_the_file_later(path: Path) -> None:
    reader = ActivityReader(path)
    assert reader.read() is None

    activity = ActivityPage(path)
    activity.now(Phase.JOINING)

    doing = reader.read()
    assert doing is not None and doing.phase is Phase.JOINING
    reader.close()
    activity.close()


def test_a_writer_that_is_stopped_half_way_leaves_the_phase_before_whole(activity: ActivityPage, path: Path) -> None:
    activity.now(Phase.COMPUTING, 5, 1)
    before = seen(path)

    with path.open("r+b") as file:
        file.seek(SLOT_OFFSETS[before.changes + 1 & 1])
        file.write(struct.pack("=d", 1e9) + b"\xff" * (SLOT.size // 2 - 8))

    assert seen(path) == before


def test_the_file_is_readable_by_its_owner_alone(activity: ActivityPage, path: Path) -> None:
    assert path.stat().st_mode & 0o077 == 0


def test_files_in_memory_have_a_place() -> None:
    assert os.access(memory_folder(), os.W_OK)


WRITER = """
    import sys
    from pathlib import Path
    from craft.protocol.values.activity import Phase
    from craft.worker.report.activity_page import ActivityPage

    activity = ActivityPage(Path(sys.argv[1]))
    print("ready", flush=True)
    step = 0
    while True:
        step += 1
        for phase in (Phase.LOADING, Phase.COMPUTING, Phase.EXCHANGING, Phase.UPDATING):
            activity.now(phase, step, step * 4 + phase)
"""


def test_no_reading_mixes_two_phases_while_another_process_writes_as_fast_as_it_can(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            reader = ActivityReader(path)
            changes: set[int] = set()
            deadline = time.monotonic() + 30
            while len(changes) < 2000 and time.monotonic() < deadline:
                doing = reader.read()
                if doing is not None and doing.step is not None:
                    assert doing.microbatch == doing.step * 4 + doing.phase
                    assert doing.changes == (doing.step - 1) * 4 + doing.phase - Phase.LOADING + 1
                    changes.add(doing.changes)
            reader.close()
        finally:
            process.kill()
    assert len(changes) >= 500


@pytest.mark.parametrize("shared", [True, False])
def test_all_time_is_counted_in_one_phase_or_another_and_a_pause_in_none_of_the_scripts(
    path: Path, shared: bool
) -> None:
    began = time.monotonic()
    activity = ActivityPage(path if shared else None)
    for phase in (Phase.LOADING, Phase.COMPUTING, Phase.EXCHANGING):
        activity.now(phase, 1)
        time.sleep(0.002)
    with activity.paused("a look at the weather"):
        time.sleep(0.002)
    activity.now(Phase.UPDATING)
    ended = time.monotonic()
    activity.close()

    spent = {phase: activity.spent_s[phase] for phase in Phase}
    assert all(spent[phase] >= 0.002 for phase in (Phase.LOADING, Phase.COMPUTING, Phase.EXCHANGING, Phase.PAUSED))
    assert spent[Phase.UPDATING] == 0.0
    assert sum(spent.values()) <= ended - began
