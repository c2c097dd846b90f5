"""The lighthouse's view of the job: all that decisions are made from.

``observing`` takes an event in: what is now known. A policy answers the event with actions; ``applying`` takes an action in:
what is now wanted. Both are pure, so that every decision can be replayed from the journal.
"""

from __future__ import annotations

import msgspec

from craft.decide.job.roster import Roster, Standing, WorkerView
from craft.protocol.actions import Stop
from craft.protocol.events import (
    CheckpointRestored,
    CheckpointWritten,
    FaultInjected,
    TimesMeasured,
    WorkerFailed,
)
from craft.protocol.membership import Generation
from craft.protocol.messages import CheckpointWish, PreemptionOrder, Restoration

__all__ = ["GONE", "Awaited", "JobState", "Owed", "Standing", "WorkerView"]

GONE: tuple[Standing, ...] = ("lost", "left", "finished")


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was lost after its loop and before the end of its script: what it did there has to be done again."""

    worker_id: str
    host: str
    reason: str
    generation: int
    """The generation that was current; a member that came later makes up for it."""
    replaceable: bool = True
    """Whether its host can start another one."""


class Awaited(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, or all workers of a host, that the job waits for."""

    worker_id: str | None = None
    host: str | None = None
    what: str = ""
    """What is known about it."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """All that decisions are made from."""

    slots: int
    """Workers to wait for before the first generation, and never more than this in one."""
    min_workers: int = 1
    workers: tuple[WorkerView, ...] = ()
    """In the order in which they were first seen; always a ``Roster``."""
    generation: Generation | None = None
    """What every member is to act under."""
    upcoming: Generation | None = None
    """What its members prepare while they go on, and enter together at a step boundary."""
    highest: int = 0
    """The highest generation number ever given out or heard of; numbers are never used twice."""
    recovering: bool = False
    """After a restart: it is not known yet under which generation the workers act."""
    absent: int = 0
    """Workers that were expected and will never join: they were lost before they could."""
    broken: tuple[int, ...] = ()
    """The current or upcoming generation, if a member said that its exchange broke."""
    complaints: tuple[tuple[str, str], ...] = ()
    """(who, about whom): members of the current generation that could not connect to one another."""
    progress: tuple[int, ...] = ()
    """Branch, committed steps and calls completed since, of the member that is furthest, as last heard of."""
    retries: int = 0
    """How many generations were made since, of the same members, because the one before broke though nobody was lost."""
    missed: tuple[tuple[str, str], ...] = ()
    """(who, about whom): because of whom these broke, as their members say; some say so of themselves."""
    blamed: int = 0
    """How many workers were declared lost since because others did not reach or meet them."""
    probing: int = 0
    """The generation whose members are to find out whom they can reach; 0: none."""
    holding: int = 0
    """The generation whose lost members are waited for to be replaced; 0: none."""
    awaited: tuple[Awaited, ...] = ()
    """Those that do not answer and have the only copy of the training state."""
    unreplaced: tuple[tuple[str, str], ...] = ()
    """(host, why): hosts that start no more workers in the place of lost ones."""
    failures: tuple[WorkerFailed, ...] = ()
    injections: tuple[FaultInjected, ...] = ()
    """The latest faults that agents and workers are to carry out; they decide nothing."""
    winding_down: str | None = None
    """Why the workers are to leave their loops, if they are."""
    preempting: PreemptionOrder | None = None
    """Why, and until when, the job is to make room, if it is."""
    wishes: tuple[CheckpointWish, ...] = ()
    """The latest wishes for checkpoints."""
    checkpoint: CheckpointWritten | None = None
    """The newest that is complete; what a job that makes room says of itself at its end."""
    begun_from: CheckpointRestored | None = None
    """The checkpoint from which this course of the job began, if it began from one."""
    branch: int = 0
    """The newest branch of history that is known of."""
    reached: int | None = 0
    """Committed steps of those who are gone, since the job last began; None: not known, perhaps there were some."""
    restoration: Restoration | None = None
    """From where the job began again, the last time that it did."""
    replacing: bool = True
    """Whether free slots are filled: not where that was found to cost more than it saves."""
    times: TimesMeasured | None = None
    """How long things take; known where answers to a loss are chosen by cost."""
    former: Generation | None = None
    """The last generation before that, until a new one is made."""
    hosts: tuple[str, ...] = ()
    """Hosts of workers that earlier lighthouses of this job knew; which of their workers are gone may be all that is left."""
    left_before: int = 0
    """Members that left as they were told while earlier lighthouses were there, and workers that did before they were members."""
    stopping: Stop | None = None
    loop: int = 1
    """The training loop of the script that the job is in or has ended last, from 1."""
    owed: tuple[Owed, ...] = ()
    """Workers that were lost after that loop and before the end of their scripts."""

    def __post_init__(self) -> None:
        if not isinstance(self.workers, Roster):
            msgspec.structs.force_setattr(self, "workers", Roster(self.workers))

    @property
    def roster(self) -> Roster:
        """``workers``, with its look-ups."""
        assert isinstance(self.workers, Roster)
        return self.workers

    def view(self, worker_id: str) -> WorkerView | None:
        return self.roster.find(worker_id)

    def host_of(self, worker_id: str) -> str:
        """The name of a known worker's host."""
        view = self.view(worker_id)
        assert view is not None
        return view.member.host

    def having(self, *standings: Standing) -> tuple[WorkerView, ...]:
        return self.roster.having(standings)

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the current generation that are not lost and not finished, in the order of their ranks."""
        if self.generation is None:
            return ()
        return self.roster.present(self.generation)

    @property
    def unpaid(self) -> tuple[Owed, ...]:
        """Those of ``owed`` whose code after the loop no other worker has run to its end yet."""
        if not self.owed or self.generation is None:
            return self.owed
        first = min(each.generation for each in self.owed)
        made_up = sum(
            member.since > first and (view := self.view(member.worker_id)) is not None and view.script_ended
            for member in self.generation.members
        )
        return self.owed[made_up:]

    @property
    def finishing(self) -> int:
        """The current generation's number if the scripts of all its members have come to their end; else 0."""
        if self.generation is None or not self.members or self.unpaid:
            return 0
        views = (self.view(worker_id) for worker_id in self.members)
        return self.generation.number if all(view is not None and view.script_ended for view in views) else 0

    @property
    def staying(self) -> tuple[str, ...]:
        """Those of ``members`` that are not about to leave."""
        leaving = frozenset(view.member.worker_id for view in self.having("member") if view.draining is not None)
        return tuple(worker_id for worker_id in self.members if worker_id not in leaving)

    @property
    def spares(self) -> tuple[str, ...]:
        """Workers without a slot that could take one."""
        return tuple(view.member.worker_id for view in self.having("waiting") if view.draining is None)

    @property
    def saved(self) -> tuple[int, int] | None:
        """Branch and committed steps of the newest complete checkpoint."""
        return None if self.checkpoint is None else (self.checkpoint.branch, self.checkpoint.step)

    @property
    def ending(self) -> bool:
        """Whether every worker is to leave at the next step boundary: nobody joins any more."""
        return self.winding_down is not None or self.preempting is not None

    @property
    def restoring(self) -> bool:
        """Whether the job begins again, and waits for the workers to do so."""
        return self.generation is None and self.former is not None

    @property
    def replaceable(self) -> bool:
        """Whether somebody can still come: some host starts workers in the place of lost ones."""
        return bool(self.known_hosts - dict(self.unreplaced).keys())

    @property
    def known_hosts(self) -> frozenset[str]:
        """Hosts with workers that did not leave as they were told."""
        named = {view.member.host for view in self.workers if view.standing != "left" and view.member.host}
        return frozenset(named.union(self.hosts))

    @property
    def left(self) -> int:
        """Members that left as they were told: no worker is started in their place."""
        return self.left_before + sum(1 for view in self.having("left") if view.entered)
