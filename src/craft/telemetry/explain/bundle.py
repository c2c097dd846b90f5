"""Write a diagnosis bundle: what all workers were doing at one moment, with findings in plain words.

In: close-ups of workers. Out: a folder with ``summary.txt`` and one file per worker. The lighthouse writes one when a worker
hangs, and ``craft debug --all`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from craft.decide.detect.blocked_collectives import findings
from craft.protocol.values.inspection import CloseUp, Collective, RecentStep
from craft.settings.files.private_files import write_private
from craft.telemetry.explain.amounts import numbered, precise_clock
from craft.telemetry.text.plain_text import one_line


def write(folder: Path, title: str, workers: Sequence[CloseUp], missing: Sequence[str] = ()) -> Path:
    """Write a bundle, readable by its owner alone. ``missing``: sentences about workers that could not be inspected."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for worker in workers:
        _private(folder / f"{safe(worker.worker_id)}.txt", text(worker))
        if worker.collectives is not None:
            data = msgspec.json.format(msgspec.json.encode(worker.collectives), indent=1)
            _private(folder / f"{safe(worker.worker_id)}.collectives.json", data.decode() + "\n")
    # Last: its presence means that the bundle is complete.
    _private(folder / "summary.txt", summary(title, workers, missing))
    return folder


def summary(title: str, workers: Sequence[CloseUp], missing: Sequence[str] = ()) -> str:
    """Return the findings, then one line per worker."""
    found = findings([worker.collectives for worker in workers if worker.collectives is not None])
    lines = [title, ""]
    if found:
        lines += ["Collectives of the script:", *(f"  {sentence}" for sentence in found), ""]
    waits = _waits(workers)
    if waits:
        lines += [waits, ""]
    lines += ["Workers:", *(f"  {sentence(worker)}" for worker in workers), *(f"  {each}" for each in missing)]
    return _joined(lines)


def _waits(workers: Sequence[CloseUp]) -> str:
    """Return whom the workers in the exchange wait for."""
    waiting = [worker for worker in workers if worker.waits_for]
    if not waiting:
        return ""
    awaited = sorted({each for worker in waiting for each in worker.waits_for})
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{', '.join(worker.worker_id for worker in waiting)} {verb} in the exchange for {', '.join(awaited)}."


def sentence(worker: CloseUp) -> str:
    """Return one worker in one line."""
    since = "" if worker.since_s is None else f" for {worker.since_s:.1f} s"
    waits = f", waits for {', '.join(worker.waits_for)}" if worker.waits_for else ""
    gil = f"; it keeps the GIL (for {worker.gil_kept_s:.1f} s)" if worker.gil_kept_s is not None else ""
    return f"{worker.worker_id}: {worker.doing}{since}{waits}; {worker.state}{gil}"


def text(worker: CloseUp) -> str:
    """Return everything about one worker."""
    rank = "no rank" if worker.rank is None else f"rank {worker.rank}"
    lines = [
        sentence(worker),
        f"process {worker.pid} of host {worker.host}, inspected at {precise_clock(worker.time)}",
        f"generation {worker.generation}, {rank} of {', '.join(worker.members) or 'no group'}",
        *_slot(worker),
        "",
        "Last committed steps:",
        *(_step(each) for each in worker.recent_steps),
        *(() if worker.recent_steps else ("  none",)),
        "",
        "Stacks:",
        *worker.stacks.rstrip("\n").split("\n"),
    ]
    if isinstance(worker.replica, int):
        lines += [
            "",
            "Collectives of its replica are not in torch's flight recorder: the stack shows in which one it is.",
        ]
    elif worker.collectives is not None:
        lines += ["", f"Collectives of its script (rank {worker.collectives.rank} there), the latest last:"]
        lines += [_collective(each) for each in worker.collectives.entries[-20:]] or ["  none"]
    return _joined(lines)


def _slot(worker: CloseUp) -> list[str]:
    if not isinstance(worker.replica, int) or not worker.mates:
        return []
    return [f"position {worker.position} of replica {worker.replica}: {', '.join(worker.mates)}"]


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(map(one_line, lines)) + "\n"


def _step(step: RecentStep) -> str:
    took = "" if step.elapsed_s is None else f", {1000 * step.elapsed_s:.1f} ms after the previous one"
    computed = numbered(step.microbatches) if step.microbatches else "no microbatch"
    return f"  step {step.step} at {precise_clock(step.time)} in generation {step.generation}{took}: {computed}"


def _collective(entry: Collective) -> str:
    sizes = " ".join("x".join(map(str, size)) or "1" for size in entry.sizes)
    ended = "done" if entry.done else "not done"
    return f"  {entry.name} number {entry.number} of group {entry.group}: {sizes} {' '.join(entry.dtypes)}, {ended}"


def safe(name: str) -> str:
    """Return a worker's id as a safe file name."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:100].lstrip(".") or "_"


def _private(path: Path, content: str) -> None:
    # The user may have named a folder in which others write, too.
    write_private(path, content.encode(errors="replace"), shared=True)
