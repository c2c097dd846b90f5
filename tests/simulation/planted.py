"""Bugs to be found: production code with a function replaced by a plausible wrong one, for as long as a test runs.

Most of them were bugs of this code once. ``kinds`` are the faults that are drawn, so that few seeds are enough; ``seeds`` is
the number within which the bug is found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from craft.agent.host import fork_server_keeper
from craft.agent.linux.fork_server_process import ForkServerProcess
from craft.control import lighthouse, respawn
from craft.control.core import loop, persistence_file, report_events
from craft.control.core.persistence import Durable
from craft.decide.job import apply, last_copy, restoration
from craft.decide.job.state import JobState
from craft.decide.policies import broken, finish, policy
from craft.protocol.actions import AnyAction, Restore
from craft.protocol.errors import ConfigError, Unreachable
from craft.protocol.events import AnyEvent, WorkerFinished
from craft.protocol.messages import Exited


@dataclass(frozen=True)
class Planted:
    """One bug."""

    name: str
    where: tuple[tuple[Any, str, Any], ...]
    """Module or class, the name in it, and what takes its place."""
    kinds: tuple[str, ...]
    finds: str
    """Part of the violation that shows it."""
    seeds: int
    first: int = 0

    @contextlib.contextmanager
    def plant(self) -> Iterator[None]:
        before = [(place, name, vars(place)[name]) for place, name, _ in self.where]
        try:
            for place, name, wrong in self.where:
                setattr(place, name, wrong)
            yield
        finally:
            for place, name, right in before:
                setattr(place, name, right)


def _never(*_: object) -> bool:
    return False


def _as_decided(state: JobState, event: AnyEvent, actions: tuple[AnyAction, ...]) -> tuple[AnyAction, ...]:
    return actions


def _holders_unless_fresh(state: JobState) -> frozenset[str]:
    """Whom this lighthouse did not hear come has the state."""
    members = state.generation.members if state.generation is not None else ()
    views = ((member, state.view(member.worker_id)) for member in members)
    return frozenset(
        member.worker_id
        for member, view in views
        if view is not None
        and view.standing == "member"
        and not view.behind
        and not (member.since and view.fresh and not view.entered)
    )


def _hosts_without_names_too(state: JobState) -> frozenset[str]:
    return frozenset({view.member.host for view in state.workers if view.standing != "left"}.union(state.hosts))


def _debts_stay(state: JobState, action: Restore) -> JobState:
    return replace(_right_begun_again(state, action), owed=state.owed)


def _finished_end_the_job(self: finish.FinishPolicy, state: JobState, event: AnyEvent) -> tuple[AnyAction, ...]:
    if not state.unfinished_scripts and state.having("finished"):
        return ()
    return _right_finish_end(self, state, event)


def _believed(data: bytes) -> bool:
    return True


def _first_or_none(self: persistence_file.DurableFile) -> Durable | None:
    found = _right_load(self)
    if found is None and self.problem:
        raise ConfigError(f"cannot go on: {self.problem}")
    return found


def _no_lines(path: object) -> int:
    return 0


def _sees_nothing(self: respawn.Pulse, count: int) -> None:
    """Whatever the child does."""


def _exit_code_0_is_the_end(exited: Exited, seen: report_events.WorkerHistory | None, state: JobState) -> Any:
    if exited.exit_code == 0:
        return WorkerFinished(worker_id=exited.worker_id, step=0 if seen is None else seen.report.step)
    return _right_ending(exited, seen, state)


async def _ends_with_its_fork_server(self: Any) -> None:
    self._process = await ForkServerProcess.start(self._settings)
    await self._follow(self._process)
    await self._process.end()
    if not self._is_over():
        raise Unreachable("the fork server ended, and its workers with it")


_right_begun_again = restoration.begun_again
_right_finish_end = finish.FinishPolicy._end
_right_load = persistence_file.DurableFile.load
_right_ending = report_events._ending

_LOSSES = ("kill worker", "kill all workers", "kill all but one")
_DRAINS = ("drain", "drain with deadline")

PLANTED = (
    Planted(
        "the last copy is given up on suspicion",
        ((policy, "keep_last_copy", _as_decided), (loop, "is_last_copy", _never)),
        ("stop worker", "kill all but one", "isolate host"),
        "only copy of the training state",
        10,
    ),
    Planted(
        "after a restart whoever joined has the state",
        ((last_copy, "holders", _holders_unless_fresh),),
        ("kill worker", "stop worker", "kill lighthouse", "kill all but one"),
        "only copy of the training state",
        20,
        180,
    ),
    Planted(
        "a worker that is gone counts as one that may come",
        ((JobState, "known_hosts", property(_hosts_without_names_too)),),
        ("kill all workers", "kill lighthouse", "kill worker"),
        "none could come any more",
        20,
        95,
    ),
    Planted(
        "the same members meet again without bound",
        ((broken, "MOST_RETRIES", 10**9),),
        ("break exchange often",),
        "none committed a step",
        20,
    ),
    Planted(
        "code after the loop is owed by a job that began again",
        ((apply, "begun_again", _debts_stay),),
        ("kill all workers", "kill worker"),
        "has not ended",
        20,
        225,
    ),
    Planted(
        "the loss of the last worker past its script ends nothing",
        ((finish.FinishPolicy, "_end", _finished_end_the_job),),
        ("stop worker", "kill lighthouse", "kill worker"),
        "has not ended",
        20,
        295,
    ),
    Planted(
        "a damaged generation.json is believed",
        ((persistence_file, "is_sealed", _believed),),
        ("flip bit",),
        "",
        30,
    ),
    Planted(
        "a torn first record keeps the lighthouse from starting",
        ((persistence_file.DurableFile, "load", _first_or_none),),
        ("disk full", "kill while writing", "syncs fail"),
        "does not start",
        20,
    ),
    Planted(
        "a damaged line of the journal keeps the lighthouse from starting",
        ((lighthouse, "quarantine", _no_lines),),
        ("flip bit",),
        "does not start",
        20,
    ),
    Planted(
        "a lighthouse that hangs is not replaced",
        ((respawn.Pulse, "look", _sees_nothing),),
        ("hang lighthouse", "stop lighthouse"),
        "has no lighthouse",
        10,
    ),
    Planted(
        "exit code 0 before the end counts as finished",
        ((report_events, "_ending", _exit_code_0_is_the_end),),
        ("exit 0 early", "kill worker"),
        "over as finished",
        20,
    ),
    Planted(
        "the death of a fork server ends the job",
        ((fork_server_keeper.ForkServerKeeper, "run", _ends_with_its_fork_server),),
        ("kill fork server",),
        "the fork server ended",
        10,
    ),
)
