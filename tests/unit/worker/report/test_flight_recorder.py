"""What torch's Flight Recorder tells of three real processes whose collectives do not fit.

Run as a program, it is one of these processes: RANK FOLDER. What they tell is what ``tests/unit/decide/detect/traces`` holds;
``python -m tests.unit.worker.test_collectives FOLDER`` makes those files anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from craft.decide.detect.blocked_collectives import findings
from craft.protocol.values.inspection import Collectives

KINDS = ("order", "size", "missing")
SIZE = 3


def _take_part(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed

    from craft.worker.report.flight_recorder import read_collectives

    # Not all of its names are exported by type.
    dist: Any = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), SIZE), rank=rank, world_size=SIZE)
    for kind in KINDS:
        group = dist.new_group(list(range(SIZE)))
        for _ in range(2):
            dist.all_reduce(torch.ones(3), group=group)
        odd = rank == SIZE - 1
        # Not waited for: it would never end.
        if kind == "order" and odd:
            dist.broadcast(torch.ones(1), src=0, group=group, async_op=True)
        elif kind == "size" and odd:
            dist.all_reduce(torch.ones(2), group=group, async_op=True)
        elif not (kind == "missing" and odd):
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(read_collectives(1, f"w{rank}")))
    # Without tearing down what hangs, and not before the others have met in every group.
    dist.barrier()
    os._exit(0)


def traces(folder: Path) -> list[Collectives]:
    """Let three processes do it, and return what each tells."""
    command = [sys.executable, __file__]
    processes = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in range(SIZE)]
    assert [process.wait(60) for process in processes] == [0] * SIZE
    return [msgspec.json.decode((folder / f"{rank}.json").read_bytes(), type=Collectives) for rank in range(SIZE)]


def of_kind(told: list[Collectives], number: int) -> list[Collectives]:
    """Only what concerns the group of one kind; groups are named in the order in which they were made."""
    names = sorted(told[0].groups, key=int)[1:]
    name = names[number]
    return [
        msgspec.structs.replace(
            each,
            groups={name: each.groups[name]},
            entries=tuple(entry for entry in each.entries if entry.group == name),
        )
        for each in told
    ]


def test_what_does_not_fit_is_found_in_what_real_processes_tell(tmp_path: Path) -> None:
    told = traces(tmp_path)

    order, size, missing = (findings(of_kind(told, number)) for number in range(3))

    assert [found.partition(":")[0] for found in (*order, *size, *missing)] == [
        "mismatched order", "mismatched size", "missing rank",
    ]  # fmt: skip
    assert all("worker w2" in found for found in (*order, *size, *missing))
    assert len(findings(told)) == 3


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _take_part(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        found = traces(Path(sys.argv[1]))
        for position, name in enumerate(KINDS):
            (Path(sys.argv[1]) / f"{name}.json").write_bytes(msgspec.json.encode(of_kind(found, position)))
