"""An agent's folder in memory: nobody takes it away while the agent lives, and the next agent does when it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.users import STRANGER, needs_root

from craft.agent.linux.scratch import Scratch

HOLD = """
import sys
from pathlib import Path
from craft.agent.linux.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.path / "agent").touch()
print(scratch.path, flush=True)
sys.stdin.read()
"""


def hold(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """An agent in a process of its own, and its folder."""
    command = [sys.executable, "-c", HOLD, str(parent)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_folder_is_removed_by_its_own_agent(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    assert scratch.path.parent == tmp_path
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    scratch.close()
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_agent_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    killed, left = hold(tmp_path)
    living, used = hold(tmp_path)
    end(killed)
    assert left.exists()
    scratch = Scratch(tmp_path)
    assert not left.exists()
    assert (used / "agent").exists()
    scratch.close()
    end(living)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    other, unfinished = tmp_path / "other", tmp_path / "craft-unfinished"
    other.mkdir()
    unfinished.mkdir()
    (other / "lock").touch()
    Scratch(tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"other", "craft-unfinished"}


@needs_root
def test_the_folder_of_another_users_agent_is_left_alone(tmp_path: Path) -> None:
    process, foreign = hold(tmp_path)
    end(process)
    for path in (foreign, *foreign.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    Scratch(tmp_path).close()
    assert (foreign / "agent").exists()
