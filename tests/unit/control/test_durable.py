from __future__ import annotations

from pathlib import Path

import pytest

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
    assert [path.name for path in tmp_path.iterdir()] == ["generation.json"]


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
