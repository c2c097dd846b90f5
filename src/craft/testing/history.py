"""Check P1 to P3 on the files of a run.

    python -m craft.testing.history RUN [REFERENCE] [--host DIR]...

REFERENCE is the directory of a run without faults, or its digest. In a job of several hosts, RUN is the directory of its
lighthouse, and each --host that of one ``craft run``. Exit code 0: every promise held; 1: some did not, and each violation
is a sentence on standard output; 2: bad input, such as a RUN that is not a run directory.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from craft.protocol.errors import ConfigError
from craft.settings.run import read_effective
from craft.settings.rundir import RunDir
from craft.telemetry.history import Commit, Run, read_run
from craft.telemetry.records.metric_lines import read_metrics
from craft.telemetry.text.plain_text import indented, one_line
from craft.testing.branches import by_place, check_branches, events, first_step, place_of
from craft.testing.metrics_files import check_metrics


class HistoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check."""

    steps: int
    """Number of committed steps."""
    digest: str | None
    """Digest of the final state, if all workers that finished agree."""
    dropped: tuple[tuple[int, int], ...]
    """(step, microbatch) of each microbatch that no worker computed; only under ``shrink``."""
    violations: tuple[str, ...]
    """One sentence each; empty if every promise held."""


def check(run_dir: Path, reference: Path | str | None = None, hosts: Sequence[Path] = ()) -> HistoryReport:
    """Check the files of a run that has ended for violations of P1, P2 and P3.

    ``reference`` is the directory of an undisturbed run, or its digest; without it the final state is only compared between the
    workers. In a job of several hosts, ``run_dir`` has the journal, and ``hosts`` are the run directories of all hosts, lost ones
    included: commits of a host that was cut off count, too.
    """
    run = read_job(run_dir, hosts)
    digests = final_digests(run)
    dropped = _dropped(run)
    violations = [
        *_bits(run, digests, reference),
        *_coverage(run),
        *_ownership(run),
        *_drops(run, dropped, _on_loss([*hosts] or [run_dir])),
        *itertools.chain.from_iterable(_own_history(worker_id, run.commits[worker_id]) for worker_id in run.commits),
        *_one_history(run),
        *_generations(run),
        *check_branches(run),
        *check_metrics(
            run, dropped, {path: list(read_metrics(RunDir(path).metrics)) for path in [*hosts] or [run_dir]}
        ),
    ]
    return HistoryReport(
        steps=_num_steps(run),
        digest=_one_digest(run, digests),
        dropped=dropped,
        violations=tuple(violations),
    )


def final_digests(run: Run) -> dict[str, str | None]:
    """Return the digest of each worker that finished."""
    return {line["worker_id"]: line["digest"] for line in events(run, "WorkerFinished") if line["complete"]}


def read_job(run_dir: Path, hosts: Sequence[Path] = ()) -> Run:
    """Read the journal of ``run_dir`` and the steps of all hosts."""
    run = read_run(run_dir) if run_dir.is_dir() else None
    if run is None or not run.journal:
        raise ConfigError(f"{run_dir} is not the directory of a run: it has no journal")
    commits, entries = dict(run.commits), dict(run.entries)
    for host in hosts:
        if not RunDir(host).config.is_file():
            raise ConfigError(f"{host} is not the run directory of a host: it has no config.toml")
        there = read_run(host)
        for worker_id, own in there.commits.items():
            if worker_id in commits:
                raise ConfigError(f"{host} has steps of {worker_id}, and so has another directory: name each host once")
            commits[worker_id] = own
        entries |= there.entries
    return Run(journal=run.journal, commits=commits, entries=entries)


def _on_loss(run_dirs: Sequence[Path]) -> str:
    """Return the answer to a loss; workers compare it at the start, so that all hosts have the same."""
    return str(read_effective(RunDir(run_dirs[0]).config).get("on_loss", "redo"))


def _num_steps(run: Run) -> int:
    places = [place_of(commit) for commits in run.commits.values() for commit in commits]
    return max(places)[1] + 1 if places else first_step(run)


def _bits(run: Run, digests: Mapping[str, str | None], reference: Path | str | None) -> Iterator[str]:
    """P1: the final state is that of the undisturbed run, on every worker that finished."""
    if not digests:
        yield "P1: no worker finished"
    wanted = (_digest_of(reference) if isinstance(reference, Path) else reference or "").split(_BETWEEN)
    for position, own in _by_position(run, digests).items():
        for digest in sorted(set(map(str, own.values()))):
            if len(set(own.values())) > 1:
                holders = ", ".join(worker_id for worker_id, other in own.items() if str(other) == digest)
                yield f"P1: workers finished with different states: {holders} with {digest}"
        expected = wanted[position] if position < len(wanted) else ""
        for worker_id, found in own.items() if reference is not None else ():
            if found != expected:
                yield f"P1: {worker_id} finished with the state {found}, the reference with {expected}"
    for line in events(run, "StateDiverged"):
        yield f"P1: the state diverged at step {line['step']}: {line['detail']}"


_BETWEEN = "+"
"""Between the digests of positions, where a model is spread over several workers."""


def _by_position(run: Run, digests: Mapping[str, str | None]) -> dict[int, dict[str, str | None]]:
    """Return the digests of the workers of each position; all are at position 0 unless the model is sharded."""
    slots = {line["member"]["worker_id"]: line["member"].get("slot") for line in events(run, "WorkerJoined")}
    found: dict[int, dict[str, str | None]] = {}
    for worker_id, digest in digests.items():
        slot = slots.get(worker_id)
        found.setdefault(slot[1] if slot else 0, {})[worker_id] = digest
    return dict(sorted(found.items()))


def _one_digest(run: Run, digests: Mapping[str, str | None]) -> str | None:
    """Return the digest of the final state, of all positions one after the other; None if workers differ."""
    found = [set(own.values()) for own in _by_position(run, digests).values()]
    if not found or any(len(own) != 1 or None in own for own in found):
        return None
    return _BETWEEN.join(str(own.pop()) for own in found)


def _digest_of(reference: Path) -> str:
    run = read_job(reference)
    digests = final_digests(run)
    found = _one_digest(run, digests)
    if found is None:
        different = len(set(digests.values()))
        raise ConfigError(f"{reference} is not a reference: its workers finished with {different} different states")
    return found


def _coverage(run: Run) -> Iterator[str]:
    """P2: every step is committed, and each worker that finished committed the last one."""
    steps = _num_steps(run)
    committed = {commit.step for commits in run.commits.values() for commit in commits}
    for step in sorted(set(range(first_step(run), steps)) - committed):
        yield f"P2: step {step} of {steps} was not committed"
    for line in events(run, "WorkerFinished"):
        own = run.commits.get(line["worker_id"], ())
        last = own[-1].step if own else None
        # A worker that began where the job ends, or took the state there, has committed nothing.
        done = last == steps - 1 or (last is None and (steps == first_step(run) > 0 or _came_at(run, line, steps)))
        if line["complete"] and (line["step"] != steps or not done):
            yield (
                f"P2: {line['worker_id']} finished after {line['step']} steps, of which the last that it wrote down"
                f" is {last}, but the job has {steps}"
            )


def _came_at(run: Run, finished: Mapping[str, Any], step: int) -> bool:
    """Return whether a worker that finished joined when only the steps before ``step`` were committed."""
    worker_id = finished["worker_id"]
    return any(entry.step == step and worker_id in entry.joiners for entry in run.entries.get(worker_id, ()))


def _ownership(run: Run) -> Iterator[str]:
    """P2: each microbatch is in the plan once and belongs to a worker of the job."""
    known = set(run.commits) | {line["member"]["worker_id"] for line in events(run, "WorkerJoined")}
    for (_, step), commits in by_place(run).items():
        for worker_id, commit in commits.items():
            if sorted(commit.plan) != list(range(len(commit.plan))) or not commit.plan:
                yield f"P2: step {step}: the plan of {worker_id} has microbatches {sorted(commit.plan)}, with gaps"
            for microbatch, owner in commit.plan.items():
                if owner is not None and owner not in known:
                    yield f"P2: step {step}: microbatch {microbatch} belongs to {owner}, which is not a worker of the job"
            planned = commit.planned_for(worker_id)
            if planned != commit.microbatches:
                yield (
                    f"P2: step {step}: {worker_id} wrote down microbatches {list(commit.microbatches)} as its own,"
                    f" and its plan says {list(planned)}"
                )


def _dropped(run: Run) -> tuple[tuple[int, int], ...]:
    found = {
        (commit.step, microbatch)
        for commits in run.commits.values()
        for commit in commits
        for microbatch, owner in commit.plan.items()
        if owner is None
    }
    return tuple(sorted(found))


def _drops(run: Run, dropped: tuple[tuple[int, int], ...], on_loss: str) -> Iterator[str]:
    """P2: a microbatch is dropped only under ``shrink``, and the journal says so."""
    journaled = {(line["step"], microbatch) for line in events(run, "StepRetried") for microbatch in line["dropped"]}
    for step, microbatch in dropped:
        if on_loss != "shrink":
            yield f"P2: step {step}: microbatch {microbatch} was not computed, though lost ones are to be redone"
        elif (step, microbatch) not in journaled:
            yield f"P2: step {step}: microbatch {microbatch} was dropped, and the journal does not say so"


def _own_history(worker_id: str, commits: tuple[Commit, ...]) -> Iterator[str]:
    """P3: a worker's steps grow by one, and its generations never decrease; only a new branch may go back."""
    for before, after in itertools.pairwise(commits):
        if after.branch < before.branch:
            yield f"P3: {worker_id} went back from branch {before.branch} to {after.branch}"
        elif after.branch == before.branch and after.step != before.step + 1:
            yield f"P3: {worker_id} committed step {after.step} after step {before.step}"
        elif after.step > before.step + 1:
            yield f"P3: {worker_id} began branch {after.branch} at step {after.step}, after step {before.step}"
        if after.generation < before.generation:
            yield (
                f"P3: {worker_id} committed step {after.step} under generation {after.generation},"
                f" after step {before.step} under generation {before.generation}"
            )


def _one_history(run: Run) -> Iterator[str]:
    """P3: all commits of a step agree, of dead workers, too; and no step is older in generation than the one before."""
    newest, newest_step = 0, -1
    for (_, step), commits in by_place(run).items():
        first_id, first = next(iter(commits.items()))
        for worker_id, commit in commits.items():
            for microbatch in sorted(first.plan.keys() | commit.plan.keys()):
                ours, theirs = first.plan.get(microbatch), commit.plan.get(microbatch)
                if ours != theirs:
                    yield (
                        f"P3: step {step}: microbatch {microbatch} is by {ours} according to {first_id},"
                        f" and by {theirs} according to {worker_id}"
                    )
            if commit.generation < newest:
                yield (
                    f"P3: {worker_id} committed step {step} under generation {commit.generation},"
                    f" when step {newest_step} had been committed under generation {newest}"
                )
        top = max(commit.generation for commit in commits.values())
        if top > newest:
            newest, newest_step = top, step


def _generations(run: Run) -> Iterator[str]:
    """P3: a generation has one membership, and only its members commit in it."""
    members = {
        line["generation"]: tuple(line["members"])
        for line in run.journal
        if line.get("action") in ("Reconfigure", "Propose")
    }
    sizes: dict[int, int] = {}
    for worker_id, commits in run.commits.items():
        for commit in commits:
            number = commit.generation
            if number not in members:
                yield f"P3: {worker_id} committed step {commit.step} under generation {number}, which was never made"
                continue
            size = sizes.setdefault(number, len(members[number]))
            if commit.world_size != size:
                yield (
                    f"P3: {worker_id} committed step {commit.step} with {commit.world_size} workers, but generation"
                    f" {number} has {size}"
                )
            if worker_id not in members[number]:
                yield f"P3: {worker_id} committed step {commit.step} under generation {number}, in which it is not"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m craft.testing.history", description="Check P1 to P3 on a run.")
    parser.add_argument("run", type=Path, help="run directory; that of the lighthouse in a job of several hosts")
    parser.add_argument("reference", nargs="?", help="directory of a run without faults, or its digest")
    parser.add_argument("--host", type=Path, action="append", default=[], help="run directory of a host, once for each")
    options = parser.parse_args(arguments)
    given = options.reference
    try:
        report = check(options.run, Path(given) if given and Path(given).is_dir() else given, options.host)
    except ConfigError as error:
        print(indented(error), file=sys.stderr)
        return 2
    for violation in report.violations:
        print(one_line(violation))
    if not report.violations:
        dropped = f", {len(report.dropped)} microbatches dropped" if report.dropped else ""
        print(f"P1 to P3 hold: {report.steps} steps, state {report.digest}{dropped}")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
