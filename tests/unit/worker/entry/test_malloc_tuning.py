"""In a process of its own each: what a heap does depends on all that was freed before."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAPPED = """
import ctypes, sys, torch
from craft.worker.entry.malloc_tuning import keep_for_next_step

class Mallinfo(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
if sys.argv[1] == "kept":
    keep_for_next_step()
before = mallinfo().hblks
block = torch.empty(30 << 20, dtype=torch.uint8)
print(mallinfo().hblks - before)
"""


@pytest.mark.parametrize(("kept", "mapped"), [("kept", 0), ("not kept", 1)])
def test_large_blocks_are_of_the_heap_and_not_pages_of_their_own_that_go_back_each_time(kept: str, mapped: int) -> None:
    done = subprocess.run([sys.executable, "-c", MAPPED, kept], capture_output=True, check=True, text=True)
    assert int(done.stdout) == mapped
