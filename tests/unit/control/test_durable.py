from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.small_disk import fill, mounted

from craft.control.durable import Durable, DurableFile, durable_of, restore
from craft.decide.membership import JobState
from craft.protocol.actions import Stop
from craft.protocol.errors import ConfigError
from craft.protocol.membership import Generation, Member

MEMBERS = (Member(worker_id="w0", host="a"), Member(worker_id="w1", host="b"))
DURABLE = Durable(
    generation=Generation(number=4, nonce="x", members=MEMBERS),
    highest=6,
    lost=(Member(worker_id="w9"),),
    stopping=Stop(reason="enough", exit_code=0),
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    file = DurableFile(tmp_path / "generation.json")
    assert file.load() is None
    file.save(DURABLE)
    assert file.load() == DURABLE
    assert (tmp_path / "generation.json").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"generation.json", ".generation.json.next"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "256k") as place:
        yield place


def test_a_disk_that_others_filled_has_room_for_what_is_durable(disk: Path) -> None:
    file = DurableFile(disk / "generation.json")
    file.save(DURABLE)
    fill(disk)
    for number in range(7, 12):
        durable = replace(DURABLE, highest=number)
        file.save(durable)
        assert file.load() == DurableFile(disk / "generation.json").load() == durable


def test_what_cannot_be_made_durable_is_not_there(disk: Path) -> None:
    """And once there is room it is."""
    file = DurableFile(disk / "generation.json")
    file.save(DURABLE)
    filler = fill(disk)
    members = tuple(Member(worker_id=f"w{number}", host="a" * 50) for number in range(400))
    large = replace(DURABLE, generation=Generation(number=7, nonce="y", members=members))
    with pytest.raises(OSError, match="No space left"):
        file.save(large)
    assert DurableFile(disk / "generation.json").load() == DURABLE
    filler.unlink()
    file.save(large)
    assert DurableFile(disk / "generation.json").load() == large


@pytest.mark.parametrize("left", [".generation.json.next", ".generation.json.last"])
def test_what_a_crash_left_does_no_harm(tmp_path: Path, left: str) -> None:
    file = DurableFile(tmp_path / "generation.json")
    file.save(DURABLE)
    (tmp_path / left).write_bytes(b"half a")
    later = replace(DURABLE, highest=9)
    file.save(later)
    assert file.load() == later
    assert {path.name for path in tmp_path.iterdir()} == {"generation.json", ".generation.json.next"}


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "generation.json"
    path.write_bytes(b'{"generation": 3}')
    with pytest.raises(ConfigError, match="Start a new run in another directory"):
        DurableFile(path).load()


def test_a_restored_state_keeps_what_was_durable() -> None:
    state = restore(JobState(slots=2), DURABLE)
    assert durable_of(state) == DURABLE
    assert state.members == ("w0", "w1")
    assert state.recovering


def test_without_anything_durable_a_lighthouse_begins_afresh() -> None:
    assert restore(JobState(slots=2), None) == JobState(slots=2)
