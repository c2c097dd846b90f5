"""The lighthouse's view of a job: everything that decisions depend on.

``observe`` takes an event in, a policy answers it with actions, ``apply`` takes an action in. All are pure, so that every
decision can be replayed from the journal.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from craft.decide.job.pairing import Candidate, fitting, num_complete, paired
from craft.decide.job.roster import Roster, Standing, WorkerView
from craft.protocol.actions import Stop
from craft.protocol.events import CheckpointRestored, CheckpointWritten, FaultInjected, TimesMeasured, WorkerFailed
from craft.protocol.membership import Generation, Slot
from craft.protocol.messages import CheckpointWish, HostPart, PreemptionOrder, Restoration

__all__ = ["GONE", "Awaited", "JobState", "LostAfterLoop", "Standing", "WorkerView"]

GONE: tuple[Standing, ...] = ("lost", "left", "finished")


class LostAfterLoop(msgspec.Struct, frozen=True, kw_only=True):
    """A worker lost after its loop and before the end of its script: another one has to run the code there."""

    worker_id: str
    host: str
    reason: str
    generation: int
    """The generation at the loss; a member that joins later runs the code."""
    replaceable: bool = True
    """Whether its host can start a replacement."""


class Awaited(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, or all workers of a host, that the job waits for."""

    worker_id: str | None = None
    host: str | None = None
    what: str = ""
    """Why it is waited for."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """The lighthouse's view of a job. A frozen value: every change makes a new one."""

    slots: int
    """Workers that the first generation waits for; no generation has more."""
    min_workers: int = 1
    replica_size: int = 1
    """Workers that hold one copy of the model together."""
    parts: tuple[tuple[str, HostPart], ...] = ()
    """(host, its workers): hosts that hold parts of replicas."""
    workers: tuple[WorkerView, ...] = ()
    """In the order in which they were first seen; always a ``Roster``."""
    generation: Generation | None = None
    """The current generation."""
    upcoming: Generation | None = None
    """The next generation: its members prepare it while they train, and enter it at the same step boundary."""
    highest: int = 0
    """The highest generation number given out or heard of; numbers are never reused."""
    recovering: bool = False
    """After a restart of the lighthouse: whether the workers' generation is still unknown."""
    absent: int = 0
    """Expected workers that were lost before they joined."""
    broken: tuple[int, ...] = ()
    """The current or upcoming generation, if a member reported that its exchange broke."""
    complaints: tuple[tuple[str, str], ...] = ()
    """(reporter, peer): members of the current generation that could not connect."""
    progress: tuple[int, ...] = ()
    """(branch, committed steps, calls since) of the member that is furthest."""
    retries: int = 0
    """Generations made in a row, of the same members, because the one before broke without a loss."""
    missed: tuple[tuple[str, str], ...] = ()
    """(reporter, member): the members because of which these generations broke; some report themselves."""
    blamed: int = 0
    """Workers declared lost since then because others could not reach them."""
    probing: int = 0
    """The generation whose members probe whom they can reach; 0: none."""
    holding: int = 0
    """The generation that waits for replacements of its lost members; 0: none."""
    moving: tuple[tuple[str, int], ...] = ()
    """(spare, position): spares that were told to end, and that their agents start again at another position."""
    awaited: tuple[Awaited, ...] = ()
    """Workers and hosts that do not answer and have the last copy of the training state."""
    unreplaced: tuple[tuple[str, str], ...] = ()
    """(host, why): hosts that start no more replacements."""
    failures: tuple[WorkerFailed, ...] = ()
    injections: tuple[FaultInjected, ...] = ()
    """The latest faults to be injected by agents and workers; no policy looks at them."""
    winding_down: str | None = None
    """Why the workers are to leave their loops, if they are."""
    preempting: PreemptionOrder | None = None
    """Why, and until when, the job is preempted, if it is."""
    wishes: tuple[CheckpointWish, ...] = ()
    """The latest requests for checkpoints."""
    checkpoint: CheckpointWritten | None = None
    """The newest complete checkpoint."""
    begun_from: CheckpointRestored | None = None
    """The checkpoint that the job started from, if any."""
    branch: int = 0
    """The newest known branch."""
    reached: int | None = 0
    """Committed steps of workers that are gone, since the last start; None: unknown, perhaps some."""
    restoration: Restoration | None = None
    """The last restore."""
    replacing: bool = True
    """Whether free slots are filled; not where filling costs more than it saves."""
    times: TimesMeasured | None = None
    """Measured times; known under ``--on-loss auto``."""
    former: Generation | None = None
    """The last generation before a restore, until a new one is made."""
    hosts: tuple[str, ...] = ()
    """Hosts known to earlier lighthouses; all of their workers may be gone."""
    left_before: int = 0
    """Members that left under earlier lighthouses, and workers that left before they were members."""
    stopping: Stop | None = None
    loop: int = 1
    """The script's current training loop, or the last one that ended; from 1."""
    owed: tuple[LostAfterLoop, ...] = ()
    """Workers lost after that loop and before the end of their scripts."""

    def __post_init__(self) -> None:
        if not isinstance(self.workers, Roster):
            msgspec.structs.force_setattr(self, "workers", Roster(self.workers))

    @property
    def roster(self) -> Roster:
        """``workers`` with its index."""
        assert isinstance(self.workers, Roster)
        return self.workers

    def view(self, worker_id: str) -> WorkerView | None:
        return self.roster.find(worker_id)

    def host_of(self, worker_id: str) -> str:
        """Return the host of a known worker."""
        view = self.view(worker_id)
        assert view is not None
        return view.member.host

    def having(self, *standings: Standing) -> tuple[WorkerView, ...]:
        return self.roster.having(standings)

    @property
    def members(self) -> tuple[str, ...]:
        """Live members of the current generation, in the order of their ranks."""
        if self.generation is None:
            return ()
        return self.roster.present(self.generation)

    @property
    def unfinished_scripts(self) -> tuple[LostAfterLoop, ...]:
        """Those of ``owed`` whose code after the loop no other worker has run yet."""
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
        """The current generation's number if the scripts of all its members have ended; else 0."""
        if self.generation is None or not self.members or self.unfinished_scripts:
            return 0
        views = (self.view(worker_id) for worker_id in self.members)
        return self.generation.number if all(view is not None and view.script_ended for view in views) else 0

    @property
    def staying(self) -> tuple[str, ...]:
        """Members that are not draining."""
        leaving = frozenset(view.member.worker_id for view in self.having("member") if view.draining is not None)
        return tuple(worker_id for worker_id in self.members if worker_id not in leaving)

    @property
    def spares(self) -> tuple[str, ...]:
        """Workers without a slot that could take one."""
        return tuple(view.member.worker_id for view in self.having("waiting") if view.draining is None)

    def position_of(self, worker_id: str) -> int:
        """Return the position of a known worker in its replica."""
        view = self.view(worker_id)
        return 0 if view is None or view.member.slot is UNSET else view.member.slot.position

    def fitting(self, staying: Sequence[str], arrivals: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return those of ``arrivals``, by default the spares, for which there is a slot beside ``staying``."""
        if arrivals is None:
            arrivals = self.spares
        if self.replica_size == 1:
            return tuple(arrivals[: max(0, self.slots - len(staying))])
        positions = (self.position_of(worker_id) for worker_id in staying)
        placed = [(worker_id, self.position_of(worker_id)) for worker_id in arrivals]
        return fitting(positions, placed, self.num_replicas)

    @property
    def num_replicas(self) -> int:
        """Replicas that the job is laid out for."""
        return self.slots // self.replica_size

    def slots_of(self, worker_ids: Sequence[str]) -> tuple[Slot, ...]:
        """Return the slots that these workers would have in a generation."""
        current = {} if self.generation is None else {each.worker_id: each.slot for each in self.generation.members}
        candidates = []
        for worker_id in worker_ids:
            slot = current.get(worker_id, UNSET)
            candidates.append(
                Candidate(
                    worker_id=worker_id,
                    position=self.position_of(worker_id),
                    replica=None if slot is UNSET else slot.replica,
                    host=self.host_of(worker_id),
                )
            )
        return paired(candidates, replica_size=self.replica_size, num_replicas=self.num_replicas)

    def can_compute(self, worker_ids: Sequence[str]) -> bool:
        """Return whether these workers have a complete replica among them."""
        if self.replica_size == 1:
            return bool(worker_ids)
        return num_complete(self.slots_of(worker_ids), self.replica_size) > 0

    def is_enough(self, worker_ids: Sequence[str]) -> bool:
        """Return whether the job can go on with these workers: not fewer than allowed, and a complete replica."""
        return len(worker_ids) >= self.min_workers and self.can_compute(worker_ids)

    @property
    def saved(self) -> tuple[int, int] | None:
        """Branch and committed steps of the newest complete checkpoint."""
        return None if self.checkpoint is None else (self.checkpoint.branch, self.checkpoint.step)

    @property
    def ending(self) -> bool:
        """Whether every worker is to leave at the next step boundary, and none joins."""
        return self.winding_down is not None or self.preempting is not None

    @property
    def restoring(self) -> bool:
        """Whether the job is being restored and waits for its workers."""
        return self.generation is None and self.former is not None

    @property
    def replaceable(self) -> bool:
        """Whether some host still starts replacements."""
        return bool(self.known_hosts - dict(self.unreplaced).keys())

    @property
    def known_hosts(self) -> frozenset[str]:
        """Hosts with workers that did not leave on request."""
        named = {view.member.host for view in self.workers if view.standing != "left" and view.member.host}
        return frozenset(named.union(self.hosts))

    @property
    def left(self) -> int:
        """Members that left on request: they get no replacement."""
        return self.left_before + sum(1 for view in self.having("left") if view.entered)
