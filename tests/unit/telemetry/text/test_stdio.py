"""Prints that nobody reads, or that a disk has no room for, end no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.small_disk import fill, mounted

PRINTS = """
import os, sys
from craft.telemetry.text import stdio
stdio.open_standard_files()
stdio.forgive()
for number in range(2000):
    print("a line", number)
    print("another line", number, file=sys.stderr)
os._exit(7) if os.fstat(1).st_ino == os.fstat(os.open(sys.argv[1], os.O_RDONLY)).st_ino else sys.exit(5)
"""


def test_nobody_listens(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    (tmp_path / "file").touch()
    ended = subprocess.run(
        [sys.executable, "-c", PRINTS, str(tmp_path / "file")], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert ended.returncode == 5
    assert b"Traceback" not in ended.stderr and ended.stderr.count(b"\n") == 2000


def test_a_process_without_standard_files_does_not_print_into_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "file")]
    ended = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], check=False)
    assert ended.returncode == 5
    assert (tmp_path / "file").read_bytes() == b""


def test_a_full_disk_takes_prints_again_when_there_is_room(tmp_path: Path) -> None:
    prints = """
import sys
from craft.telemetry.text import stdio
stdio.forgive()
print("there is no room")
print("printed", file=sys.stderr)
sys.stdin.readline()
print("there is room")
"""
    with mounted(tmp_path / "disk", "64k") as disk, (disk / "log").open("wb") as log:
        filler = fill(disk)
        command = [sys.executable, "-c", prints]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.PIPE) as printing:
            assert printing.stderr is not None
            assert printing.stderr.readline() == b"printed\n"
            filler.unlink()
            printing.communicate(b"\n")
        assert printing.returncode == 0
        assert (disk / "log").read_bytes() == b"there is room\n"
