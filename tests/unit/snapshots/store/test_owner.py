"""A place for checkpoints is that of the job which began there last, and nobody else lists anything there."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.protocol.events import AnyNote, CheckpointFailed, CheckpointWritten
from craft.snapshots.checkpoint.writer import CheckpointWriter
from craft.snapshots.store.owner import StoreTaken, check_owner, claim, job_of
from craft.snapshots.store.tiers import open_tiers

from ..scene import LIMIT_S, Trained, place, steps_of


def test_whoever_claims_it_last_has_it(tmp_path: Path) -> None:
    store = open_tiers(str(tmp_path)).durable
    check_owner(store, "first")
    claim(store, "first")
    check_owner(store, "first")
    claim(store, "second")
    check_owner(store, "second")
    with pytest.raises(StoreTaken, match="belongs to another job, which began there after this one"):
        check_owner(store, "first")
    # What nobody can read keeps nobody out: the next job to begin there writes it anew.
    for rubbish in (b"", b"\xff\x00", b"{}", b'{"job": 7}'):
        store.put("owner", rubbish)
        check_owner(store, "first")


def test_a_damaged_owner_is_never_another_job(tmp_path: Path) -> None:
    store = open_tiers(str(tmp_path)).durable
    claim(store, "first")
    path = tmp_path / "owner"
    good = path.read_bytes()
    for number in range(8 * len(good)):
        data = bytearray(good)
        data[number // 8] ^= 1 << number % 8
        path.write_bytes(data)
        check_owner(store, "first")


@pytest.mark.parametrize("near", [None, "near"])
def test_a_job_that_another_one_came_after_lists_nothing_more_and_says_so_once(
    tmp_path: Path, near: str | None
) -> None:
    tiers = open_tiers(str(tmp_path / "far"), str(tmp_path / near) if near is not None else None, "first")
    told: list[AnyNote] = []
    writer = CheckpointWriter(tiers, "w0", 3, told.append)
    claim(tiers.durable, "first")
    trained = Trained()
    writer.take(trained.at(1), place(1))
    assert writer.wait(LIMIT_S)
    claim(tiers.durable, "second")
    writer.take(trained.at(2), place(2))
    assert writer.wait(LIMIT_S)
    writer.close()

    (failed,) = [event for event in told if isinstance(event, CheckpointFailed)]
    assert "two jobs need two places" in failed.error and failed.retry_s is None
    assert [event.step for event in told if isinstance(event, CheckpointWritten) and event.url == tiers.url] == [1]
    assert steps_of(open_tiers(tiers.url)) == [1]


def test_workers_of_one_job_have_one_id_and_a_process_by_itself_has_its_own() -> None:
    assert job_of(b"key") == job_of(b"key") != job_of(b"other")
    assert job_of(b"") != job_of(b"")
