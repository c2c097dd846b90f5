"""Who is in a generation, and what each of its members knows about its own progress."""

from __future__ import annotations

import msgspec

DROPPED = -1
"""The owner of a microbatch that nobody computes (only under ``shrink``)."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the others need to know it."""

    worker_id: str
    host: str = "localhost"
    """Name of the host, the same for all its workers."""
    address: str = "127.0.0.1"
    """Where the others reach it."""
    store_port: int = 0
    """Port of the rendezvous store it hosts; the one of rank 0 is used."""
    state_port: int = 0
    """Port at which it serves its state to joiners."""
    local_rank: int | None = None
    """Its place on its host, and the number of its GPU there; whoever replaces it has the same."""
    late: bool = False
    """Whether it was started as a spare, in the place of a lost worker, or by a host that came to a job on its way."""
    guest: bool = False
    """Whether its loop is not CRAFT's: what becomes of a step is for others to say."""
    since: int = 0
    """The generation from which on it has been a member without a break; 0: from the first one on."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the membership. A rank is a position in ``members``, and means nothing outside."""

    number: int
    nonce: str
    """Sets this generation apart from one of the same number that a lost lighthouse may have begun."""
    members: tuple[Member, ...]

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


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a member brings into a new generation; made only after it promised to commit under no older one."""

    worker_id: str
    branch: int = 0
    committed: int | None = 0
    """Number of committed steps, which is also the number of the step in flight. None: it has no state yet."""
    result: int | None = None
    """The generation under which it got the whole result of the step in flight, if it did."""
    held: tuple[int, ...] = ()
    """Microbatches of the step in flight whose gradients it holds."""
    pending: tuple[int, ...] = ()
    """Microbatches of the step in flight that it was given and has not computed yet."""
    again: tuple[int, ...] = ()
    """Those of them that it had computed and has let go."""
    size: int = 0
    """How many microbatches that step has, if it has begun."""
    able: bool = True
    """Whether it can be given microbatches; a joiner is when it has caught up and has computed one to warm up."""
    started: bool = False
    """Whether it has found that all began from the same state. If one has, all have the same, and none checks again."""
    calls: int = 0
    """Collective calls between the steps that it completed since its last commit."""
    call_result: int | None = None
    """The generation under which it got everybody's part of the collective call it is in, if it did."""
    call: str = ""
    """The name of the collective call it is in; empty: it is in none."""
    rewinds: int = 0
    """How often it has gone back to a checkpoint; beginning from one counts, too."""
    rewind_to: tuple[int, int] | None = None
    """(branch, step) of the checkpoint that it has read and verified, if all are about to go back to one."""
    loop: int = 1
    """The training loop of its script that it is in or has ended last, from 1."""
    over: bool = False
    """Whether it knows that every member has come to the end of that loop."""
    first_step: int = 0
    """The number of that loop's first step."""


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of a new generation do, each having run the same function on the same claims."""

    step: int
    """The number of steps committed by everyone once this settlement is carried out."""
    commits: tuple[str, ...]
    """Those that commit the result they have in hand."""
    owners: tuple[int, ...]
    """For each microbatch of step ``step``: the rank that holds or computes it, or DROPPED."""
    given: tuple[int, ...]
    """Microbatches that nobody held or had begun, and which are computed (again) in this generation."""
    idle: tuple[str, ...] = ()
    """Members that are given nothing until they say that they are able."""
    joiners: tuple[str, ...] = ()
    """Members without any state: those of ``idle`` that need it from the others."""
    calls: int = 0
    """Collective calls since the last commit that count as completed, by everybody who stands at ``step``."""
    branch: int = 0
    rewinds: int = 0
    """How often everybody has gone back to a checkpoint once this is carried out: whoever has not, does so now."""
    loop: int = 1
    """The training loop that those who have the state are in, or have ended last."""
    over: bool = False
    """Whether that loop is over."""
    first_step: int = 0
    """The number of that loop's first step."""
