"""A bundle of what all workers were doing: the finding first, then all there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from craft.protocol.values.inspection import CloseUp, Collective, Collectives, RecentStep
from craft.telemetry.explain import bundle


def worker(worker_id: str, **more: Any) -> CloseUp:
    given = {
        "host": "node7", "pid": 7, "time": 1000.25, "state": "asleep in the kernel (futex), no CPU used", "stopped": False,
        "phase": "exchanging", "doing": "in the exchange of step 41", "since_s": 12.3, "step": 41, "microbatch": None,
        "gil_kept_s": None, "generation": 2, "rank": 0, "members": ("w0", "w1"), "stacks": "File train.py, line 3",
        "recent_steps": (RecentStep(step=40, generation=2, time=999.0, elapsed_s=0.05, microbatches=(0, 1)),),
    }  # fmt: skip
    return CloseUp(worker_id=worker_id, **{**given, **more})


def all_reduce(worker_id: str, rank: int, *sizes: int) -> Collectives:
    entries = tuple(
        Collective(group="0", number=number, name="all_reduce", sizes=((size,),), dtypes=("Float",))
        for number, size in enumerate(sizes, 1)
    )
    return Collectives(number=1, worker_id=worker_id, rank=rank, groups={"0": (0, 1)}, entries=entries)


def test_the_summary_begins_with_what_was_found_and_names_whom_the_others_wait_for(tmp_path: Path) -> None:
    hung = worker("w1", phase="computing", doing="computing microbatch 3 of step 41", gil_kept_s=11.0)
    folder = bundle.write(tmp_path / "b", "w1 hangs: it sleeps", [worker("w0", waits_for=("w1",)), hung], ["w2: away"])

    said = (folder / "summary.txt").read_text()
    assert said.startswith("w1 hangs: it sleeps\n")
    assert "w0 waits in the exchange for w1." in said
    assert (
        "w1: computing microbatch 3 of step 41 for 12.3 s; asleep" in said and "it keeps the GIL (for 11.0 s)" in said
    )
    assert "w2: away" in said
    assert oct((folder / "summary.txt").stat().st_mode)[-3:] == "600"


def test_each_worker_has_a_file_with_its_steps_and_stacks(tmp_path: Path) -> None:
    bundle.write(tmp_path / "b", "asked", [worker("w0"), worker("../odd name")])

    said = (tmp_path / "b" / "w0.txt").read_text()
    assert "generation 2, rank 0 of w0, w1" in said and "50.0 ms after the previous one: microbatches 0, 1" in said
    assert said.endswith("Stacks:\nFile train.py, line 3\n")
    assert {file.name for file in (tmp_path / "b").iterdir()} == {"summary.txt", "w0.txt", "_odd_name.txt"}


def test_collectives_that_do_not_fit_are_named_in_the_summary() -> None:
    workers = [
        worker("w0", collectives=all_reduce("w0", 0, 3, 1)),
        worker("w1", collectives=all_reduce("w1", 1, 3, 2)),
    ]

    said = bundle.summary("w0 hangs", workers)

    assert "mismatched size: worker w0 is at all_reduce number 2 of 4 bytes while worker w1 is at" in said
