"""What a worker that comes later does before it meets the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.adapters.huggingface.trainer import still_there


@pytest.mark.parametrize("asked", [None, False, True, "{folder}/checkpoint-5", "{folder}/checkpoint-3"])
def test_a_worker_that_comes_later_goes_on_from_the_same_checkpoint_while_it_is_there(
    asked: str | bool | None, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    given = asked.format(folder=tmp_path) if isinstance(asked, str) else asked
    is_there = asked is True or (isinstance(asked, str) and asked.endswith("5"))
    assert still_there(given, str(tmp_path)) == (str(tmp_path / "checkpoint-5") if is_there else None)


def test_one_that_is_just_being_written_is_left_to_those_who_write_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    assert still_there(True, str(tmp_path)) is None
