from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.small_disk import fill, mounted

from craft.control.core.persistence import Durable, durable_of, restore
from craft.control.core.persistence_file import Copy, DurableFile, decode
from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.protocol.actions import Stop
from craft.protocol.errors import ConfigError
from craft.protocol.events import CheckpointWritten, ReplacementsEnded
from craft.protocol.membership import Generation, Member

MEMBERS = (Member(worker_id="w0", host="a"), Member(worker_id="w1", host="b"))
DURABLE = Durable(
    generation=Generation(number=4, nonce="x", members=MEMBERS),
    highest=6,
    lost=(Member(worker_id="w9"),),
    hosts=("a", "b", "localhost"),
    left=2,
    stopping=Stop(reason="enough", exit_code=0),
    checkpoint=CheckpointWritten(name="0001-000000000008-x", branch=1, step=8, url="store"),
    branch=1,
)
FILES = {"generation.json", ".generation.json.next", ".generation.json.spare"}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    file = DurableFile(tmp_path / "generation.json")
    assert file.load() is None
    file.save(DURABLE)
    assert file.load() == DURABLE
    assert (tmp_path / "generation.json").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == FILES


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "512k") as place:
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


@pytest.mark.parametrize("left", [".generation.json.next", ".generation.json.last", ".generation.json.spare"])
def test_what_a_crash_left_does_no_harm(tmp_path: Path, left: str) -> None:
    file = DurableFile(tmp_path / "generation.json")
    file.save(DURABLE)
    (tmp_path / left).write_bytes(b"half a")
    later = replace(DURABLE, highest=9)
    file.save(later)
    assert file.load() == later
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "generation.json"
    path.write_bytes(b'{"generation": 3}')
    with pytest.raises(ConfigError, match="start a new run in another directory"):
        DurableFile(path).load()


def flipped(data: bytes) -> Iterator[bytes]:
    """Every copy of ``data`` in which one bit is another."""
    for position, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[position] ^= 1 << bit
        yield bytes(changed)


def saved(path: Path) -> bytes:
    """What is in the file, without most of the room behind it."""
    DurableFile(path).save(DURABLE)
    return path.read_bytes()[: len(path.read_bytes().rstrip()) + 8]


def test_a_file_with_a_flipped_bit_is_never_another_state(tmp_path: Path) -> None:
    good = saved(tmp_path / "generation.json")
    assert decode(good) == Copy(DURABLE, sealed=True)
    found = [decode(data) for data in flipped(good)]
    assert {each.durable for each in found} == {None, DURABLE}
    assert not any(each.sealed for each in found), "one that may be accepted has lost its checksum, and nothing else"


@pytest.mark.parametrize("name", ["generation.json", ".generation.json.spare"])
def test_a_damaged_copy_is_repaired_from_the_other_one_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    path, copy = tmp_path / "generation.json", tmp_path / name
    good = saved(path)
    for data in itertools.islice(flipped(good), 5, None, 797):
        copy.write_bytes(data)
        file = DurableFile(path)
        assert file.load() == DURABLE
        assert file.problem and decode(copy.read_bytes()) == Copy(DURABLE, sealed=True)
    assert ("goes on from its spare copy" if copy == path else "it is written anew") in caplog.text
    assert (tmp_path / "generation.json.damaged").exists() == (copy == path)


def test_a_file_of_which_both_copies_are_damaged_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path, spare = tmp_path / "generation.json", tmp_path / ".generation.json.spare"
    damaged = next(flipped(saved(path)))
    path.write_bytes(damaged)
    spare.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"its spare copy, is damaged.* start a new run in another directory"):
        DurableFile(path).load()


def test_a_file_that_is_gone_is_restored_from_its_spare_copy(tmp_path: Path) -> None:
    path = tmp_path / "generation.json"
    DurableFile(path).save(DURABLE)
    path.unlink()
    file = DurableFile(path)
    assert file.load() == DURABLE and "is missing" in file.problem
    assert path.exists()


def test_a_file_of_an_earlier_version_has_no_checksum_and_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "generation.json"
    old = replace(DURABLE, checkpoint=msgspec.UNSET, branch=0)
    path.write_bytes(msgspec.json.encode(old).ljust(16384) + b"\n")
    file = DurableFile(path)
    assert file.load() == old and not file.problem


def test_a_restored_state_keeps_what_was_durable() -> None:
    state = restore(JobState(slots=2), DURABLE)
    assert durable_of(state) == DURABLE
    assert state.members == ("w0", "w1")
    assert state.recovering


def test_a_host_whose_workers_are_all_gone_counts_until_it_starts_no_more() -> None:
    gone = Durable(
        generation=Generation(number=1, nonce="n", members=()), gone=("w0", "w1"), hosts=("h1",), left=1, highest=1
    )
    state = restore(JobState(slots=2), gone)
    assert state.replaceable and state.left == 1
    state = observe(state, ReplacementsEnded(host="h1", reason="--max-restarts is 1"))
    assert not state.replaceable


def test_without_anything_durable_a_lighthouse_begins_afresh() -> None:
    assert restore(JobState(slots=2), None) == JobState(slots=2)


def test_a_first_record_that_was_never_whole_keeps_no_lighthouse_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "generation.json"
    DurableFile(path).save(DURABLE)
    whole = (tmp_path / ".generation.json.spare").read_bytes()
    for name in ("generation.json", ".generation.json.next"):
        (tmp_path / name).unlink()
    (tmp_path / ".generation.json.spare").write_bytes(whole[:40])
    file = DurableFile(path)
    assert file.load() is None
    assert "never whole" in file.problem
    file.save(DURABLE)
    assert DurableFile(path).load() == DURABLE
