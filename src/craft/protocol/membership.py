"""The members of a generation, their claims, and what they settle."""

from __future__ import annotations

import msgspec

DROPPED = -1
"""The owner of a microbatch that no worker computes (only under ``shrink``)."""


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A place in the layout of a job whose model is sharded."""

    replica: int
    """The workers with this number hold one copy of the model together."""
    position: int
    """Its part of the model, from 0; decided when the worker starts, and never changed."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as the others need to know it."""

    worker_id: str
    host: str = "localhost"
    """Name of the host, the same for all its workers."""
    address: str = "127.0.0.1"
    """The address at which the others reach it."""
    store_port: int = 0
    """Port of the rendezvous store that it hosts; all use that of rank 0."""
    state_port: int = 0
    """Port on which it serves its state to joiners."""
    local_rank: int | None = None
    """Its place on its host, and the number of its GPU there; its replacement has the same."""
    late: bool = False
    """Whether it was started as a spare, as a replacement, or by a host that came to a running job."""
    guest: bool = False
    """Whether its loop is not CRAFT's: CRAFT does not settle its steps."""
    since: int = 0
    """The generation since which it is a member without a break; 0: since the first one."""
    slot: Slot | msgspec.UnsetType = msgspec.UNSET
    """Its replica and position; unset where every replica is one worker."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the membership. A rank is a position in ``members``, and has no meaning outside."""

    number: int
    nonce: str
    """Distinguishes this generation from one of the same number that a lost lighthouse may have begun."""
    members: tuple[Member, ...]
    replica_size: int | msgspec.UnsetType = msgspec.UNSET
    """Workers of a complete replica; unset: 1."""

    @property
    def name(self) -> str:
        return f"{self.number}-{self.nonce}"

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(member.worker_id for member in self.members)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the members' hosts, in the order of ranks."""
        return tuple(member.host for member in self.members)

    def rank_of(self, worker_id: str) -> int | None:
        return next((rank for rank, member in enumerate(self.members) if member.worker_id == worker_id), None)


class GroupProgress(msgspec.Struct, frozen=True, array_like=True):
    """How many collectives of an update a worker has the outputs of, in one process group of its replica."""

    group: int
    """A number for the group, the same on all its members."""
    positions: tuple[int, ...]
    """Of the members of the group."""
    count: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a member brings into a new generation, after it promised not to commit under an older one."""

    worker_id: str
    branch: int = 0
    committed: int | None = 0
    """Number of committed steps, which is also the number of the step in flight. None: it has no state yet."""
    result: int | None = None
    """The generation under which it got the complete result of the step in flight, if it did."""
    held: tuple[int, ...] = ()
    """Microbatches of the step in flight whose gradients it holds."""
    pending: tuple[int, ...] = ()
    """Microbatches of the step in flight that it has to compute."""
    again: tuple[int, ...] = ()
    """Those of ``pending`` that it computed before and released."""
    size: int = 0
    """How many microbatches the step in flight has, if it has begun."""
    able: bool = True
    """Whether it can get microbatches; a joiner can once it has caught up and computed one to warm up."""
    started: bool = False
    """Whether it has checked that all began from the same state. If one has, all have the same, and none checks again."""
    calls: int = 0
    """Collective calls between the steps that it completed since its last commit."""
    call_result: int | None = None
    """The generation under which it got all parts of its current collective call, if it did."""
    call: str = ""
    """The name of its current collective call; empty outside of one."""
    rewinds: int = 0
    """How often it went back to a checkpoint; starting from one counts, too."""
    rewind_to: tuple[int, int] | None = None
    """(branch, step) of the checkpoint that it read and verified, if all are about to go back to one."""
    loop: int = 1
    """The script's current training loop, or the last one that ended; from 1."""
    over: bool = False
    """Whether it knows that every member reached the end of that loop."""
    first_step: int = 0
    """The number of that loop's first step."""
    collectives: tuple[GroupProgress, ...] | msgspec.UnsetType = msgspec.UNSET
    """In a sharded replica, after the inner loop of its last committed step: how far its update has come, group by group."""


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of a new generation do; each computes it from the same claims."""

    step: int
    """Steps that every member has committed once this settlement is carried out."""
    commits: tuple[str, ...]
    """Members that commit the result they hold."""
    owners: tuple[int, ...]
    """For each microbatch of step ``step``: the replica that holds or computes it, or DROPPED. A replica of one worker has
    that worker's rank as its number."""
    given: tuple[int, ...]
    """Microbatches that no member held or had begun; they are computed (again) in this generation."""
    idle: tuple[str, ...] = ()
    """Members that get no microbatches until they report that they are able."""
    joiners: tuple[str, ...] = ()
    """Those of ``idle`` that have no state and need it from the others."""
    held: tuple[int, ...] = ()
    """Microbatches that their replica holds; it computes its others."""
    calls: int = 0
    """Collective calls since the last commit that count as completed, by every member at ``step``."""
    branch: int = 0
    rewinds: int = 0
    """How often every member has gone back to a checkpoint once this is carried out; those that have not do so now."""
    loop: int = 1
    """The current training loop of members with the state, or the last one that ended."""
    over: bool = False
    """Whether that loop is over."""
    first_step: int = 0
    """The number of that loop's first step."""
