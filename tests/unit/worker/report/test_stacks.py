"""Being ready to be asked for stacks. That the answer comes from whatever hangs is tested beside the agent, who asks."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest

from craft.agent.linux import procfs
from craft.wire.activity import STACKS_SIGNAL
from craft.worker.report import stacks


def test_the_signal_makes_this_process_write_its_stacks_to_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    path.write_text("before\n")
    stacks.register(path)
    try:
        signal.raise_signal(STACKS_SIGNAL)
    finally:
        faulthandler.unregister(STACKS_SIGNAL)

    text = path.read_text()
    assert text.startswith("before\n")
    assert "test_the_signal_makes_this_process_write" in text


def test_outside_of_craft_run_the_signal_is_left_alone() -> None:
    stacks.register(None)

    assert not procfs.catches(os.getpid(), STACKS_SIGNAL)


def test_the_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    stacks.register(tmp_path / "stacks")
    faulthandler.unregister(STACKS_SIGNAL)

    assert (tmp_path / "stacks").stat().st_mode & 0o077 == 0


def test_the_signal_is_none_of_the_ordinary_ones() -> None:
    with pytest.raises(ValueError, match="not a valid"):
        signal.Signals(STACKS_SIGNAL)
