"""Heap and multiprocessing sockets of a worker; both depend on all that a process did before, so each test runs one."""

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
from craft.worker.entry.process_setup import use_agent_folder

def listen():
    listener = Listener(family="AF_UNIX")
    os.write(1, listener.address.encode() + b"\\n")
    signal.pause()

use_agent_folder(Path(sys.argv[1]))
multiprocessing.get_context("fork").Process(target=listen, daemon=True).start()
listen()
"""

MAPPED = """
import ctypes, sys, torch
from craft.worker.entry.process_setup import reuse_freed_memory

class Mallinfo(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
if sys.argv[1] == "kept":
    reuse_freed_memory()
before = mallinfo().hblks
block = torch.empty(30 << 20, dtype=torch.uint8)
print(mallinfo().hblks - before)
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


@pytest.mark.parametrize(("kept", "mapped"), [("kept", 0), ("not kept", 1)])
def test_large_blocks_come_from_the_heap_and_not_from_new_mappings(kept: str, mapped: int) -> None:
    done = subprocess.run([sys.executable, "-c", MAPPED, kept], capture_output=True, check=True, text=True)
    assert int(done.stdout) == mapped
