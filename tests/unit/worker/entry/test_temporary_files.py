"""What multiprocessing of a killed worker leaves behind is with its agent, which removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from craft.settings.worker import multiprocessing_folder

LISTEN = """
import multiprocessing, os, signal, sys
from multiprocessing.connection import Listener
from pathlib import Path
from craft.worker.entry.temporary_files import keep_with_agent

def listen():
    listener = Listener(family="AF_UNIX")
    os.write(1, listener.address.encode() + b"\\n")
    signal.pause()

keep_with_agent(Path(sys.argv[1]))
multiprocessing.get_context("fork").Process(target=listen, daemon=True).start()
listen()
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="craft-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", ["node7.cluster-w0", "n" * 90])
def test_sockets_of_multiprocessing_are_in_the_folder_of_the_agent(short: Path, name: str) -> None:
    activity, temporary = short / f"{name}.activity", short / "t"
    temporary.mkdir()
    surroundings = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", LISTEN, str(activity)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings, start_new_session=True)
    assert process.stdout is not None
    addresses = [Path(process.stdout.readline().strip()) for _ in range(2)]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    folder = multiprocessing_folder(activity)
    assert folder.name == f"{name}.mp"
    fits = len(name) < 90
    assert ({address.parent for address in addresses} == {folder}) == fits
    # Where the path would be too long for a socket, Python's own place is used.
    assert all(address.parent.name.startswith("pymp-") for address in addresses) != fits
    assert bool(list(temporary.iterdir())) != fits
