"""A simulated worker: a small state machine that speaks the real protocol with its agent, and trains with the others.

Here is what it makes of directives, as ``craft.worker.membership.client`` does: which generation it acts under, which one
it prepares for, when it must end. What it does in a generation is in ``training``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from craft.protocol.events import WorkerFailed
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Broken, Directive, Restoration, WorkerReport
from craft.protocol.values.activity import Doing, Phase
from craft.wire import codec

from .clock import Process
from .groups import Group
from .messages import Message
from .training import Training

if TYPE_CHECKING:
    from .world import World

OPEN_LIMIT_S = 15.0
_LOOK_S = 0.05
_UNREACHABLE_S = 2.0
_FENCED = 70


class Worker:
    """Lives in its own simulated process."""

    def __init__(self, world: World, process: Process, environment: dict[str, str]) -> None:
        self.world = world
        self.process = process
        self.worker_id = environment["CRAFT_WORKER_ID"]
        self.host = process.host
        self.starts_at = process.loop.now + world.chance.uniform(0.1, 0.6)
        self._socket = environment["CRAFT_SOCKET"]
        member = Member(
            worker_id=self.worker_id,
            host=self.host,
            address=self.host,
            local_rank=int(environment["CRAFT_LOCAL_RANK"]),
            late=environment["CRAFT_LATE"] == "True",
        )
        self.report = WorkerReport(member=member, pid=process.pid, checkpoints=world.plan.checkpoints)
        self.directive = Directive(sequence=0)
        self.training = Training(self)
        self.current: Group | None = None
        """Where it meets the others, or is about to."""
        self.upcoming: Group | None = None
        self.upcoming_opened = False
        self.left_behind: list[Group] = []
        self.leaving = 0
        """The upcoming generation in which this worker is not."""
        self.is_inside = False
        """Whether it has ever taken part in a generation."""
        self.restoration: Restoration | None = None
        self.doing = Doing(phase=Phase.STARTING, since=process.loop.now)
        self._probed = 0
        self._received = b""

    # Life

    def begin(self) -> None:
        """The script runs up to its first step, then joins."""
        self._channel = self.world.machine.connect(self._socket, self._hear)
        self.process.on_exit.append(self._hang_up)
        self.say()
        self.process.later(self.starts_at - self.process.loop.now, self._join)

    def _join(self) -> None:
        self.phase(Phase.JOINING)
        self.say(joined=True, loop=1)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def say(self, **changes: Any) -> None:
        """Change what is reported of this worker."""
        self.report = replace(self.report, sequence=self.report.sequence + 1, **changes)
        if self._channel is not None:
            self._channel.send(codec.frame(self.report))

    def exit(self, code: int) -> None:
        self.process.end(code)

    def leave(self) -> None:
        """End as it was told to."""
        self.say(left=True)
        self.process.later(0.01, self.exit, 0)

    def fail(self, error: str) -> None:
        """The script raises an exception."""
        step = self.training.ledger.step if self.is_inside else None
        late = self.report.member.late
        self.say(failed=WorkerFailed(worker_id=self.worker_id, error=error, traceback=error, step=step, late=late))
        self.process.later(0.02, self.exit, 1)

    def phase(self, phase: Phase, microbatch: int | None = None) -> None:
        """Say what the main thread is doing."""
        now, before = self.process.loop.now, self.doing
        longest = list(before.longest)
        longest[before.phase] = max(longest[before.phase] or 0.0, now - before.since)
        self.doing = Doing(
            phase=phase,
            since=now,
            step=self.training.ledger.step,
            microbatch=microbatch,
            commits=self.training.commits,
            changes=before.changes + 1,
            longest=tuple(longest),
        )

    # Directives

    def _hear(self, data: bytes) -> None:
        """Called in the kernel's context: the process takes it when it runs."""
        if data:
            self.process.soon(self._take_bytes, data)

    def _take_bytes(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= codec.HEADER_BYTES:
            end = codec.HEADER_BYTES + codec.frame_size(self._received[: codec.HEADER_BYTES])
            if len(self._received) < end:
                return
            message = codec.decode(self._received[codec.HEADER_BYTES : end])
            self._received = self._received[end:]
            if isinstance(message, Directive):
                self._direct(message)

    def _direct(self, directive: Directive) -> None:
        self.directive = directive
        self._restore(directive.restoration)
        if self.worker_id in directive.fenced:
            self.exit(_FENCED)
        elif not self.is_inside and (directive.stopping or self.worker_id in directive.released):
            self.leave()
        if self.process.state == "dead" or self.report.left:
            return
        if directive.generation is not None:
            self._act_under(directive.generation)
        self._prepare(directive.upcoming)
        if directive.probe and self.current is not None and directive.probe == self.number:
            self._probe(self.current, "stuck, though every member can be reached")
        self.training.directed()

    @property
    def number(self) -> int:
        """The generation that it is to act under."""
        return self.current.generation.number if self.current is not None else 0

    @property
    def ready(self) -> int:
        """The newest generation that it is ready for."""
        if self.leaving:
            return self.leaving
        if self.upcoming is not None and self.upcoming_opened:
            return self.upcoming.generation.number
        return self.number

    def _restore(self, restoration: Restoration | None) -> None:
        known = self.restoration.number if self.restoration is not None else 0
        if restoration is None or restoration.number <= known:
            return
        self.restoration = restoration
        if self.training.has_entered:
            self.exit(_FENCED)
        elif self.current is not None and self.number <= restoration.after:
            self._abandon()
            self.current = None

    def _act_under(self, generation: Generation) -> None:
        if generation.number <= self.number:
            return
        if generation.rank_of(self.worker_id) is None:
            self._left_out(generation)
        elif self.upcoming is not None and self.upcoming.generation == generation:
            # The others have entered it at their step boundary; this one is about to come to its own.
            self.follow()
        else:
            self._abandon()
            self.current = self._come(generation)

    def _left_out(self, generation: Generation) -> None:
        if not self.is_inside:
            # A spare that was about to join, and has to wait again.
            self._abandon()
        elif self.leaving == generation.number:
            return
        elif self.leaving:
            self.leave()
        else:
            self.exit(_FENCED)

    def _prepare(self, upcoming: Generation | None) -> None:
        if self.upcoming is not None and self.upcoming.generation != upcoming:
            self.upcoming.leave(self)
            self.upcoming = None
        if upcoming is None or upcoming.number <= self.number:
            return
        if upcoming.rank_of(self.worker_id) is None:
            if self.is_inside:
                self.leaving = upcoming.number
        elif not self.is_inside:
            self._abandon()
            self.current = self._come(upcoming)
        elif self.upcoming is None:
            self.upcoming, self.upcoming_opened = self._come(upcoming), False

    # Groups

    def _come(self, generation: Generation) -> Group:
        group = self.world.groups.of(generation)
        self.process.later(OPEN_LIMIT_S, self._not_open, group)
        group.come(self)
        return group

    def _abandon(self) -> None:
        """Abort every group."""
        for group in (self.current, self.upcoming, *self.left_behind):
            if group is not None:
                group.leave(self)
        self.upcoming, self.left_behind = None, []

    def follow(self) -> None:
        """Go on where the upcoming generation meets."""
        if self.current is not None:
            # Not aborted: another member may still be reading what was sent to it there.
            self.left_behind.append(self.current)
        opened, self.current, self.upcoming = self.upcoming_opened, self.upcoming, None
        if opened and self.current is not None:
            self.training.enter(self.current)

    def opened(self, group: Group) -> None:
        if group is self.upcoming:
            self.upcoming_opened = True
        elif group is self.current:
            self.training.enter(group)

    def _not_open(self, group: Group) -> None:
        if group in (self.current, self.upcoming) and not group.is_open:
            self._say_broken(group, "not all members came", group.missing(), group.unreachable(self))

    def broke(self, group: Group, peer: str) -> None:
        """A member is gone, or went on without this one."""
        number = group.generation.number
        if group in self.left_behind or number < self.number or group not in (self.current, self.upcoming):
            return
        self.training.broke(group)
        self._say_broken(group, f"connection to {peer} closed", (peer,), ())
        self._probe(group, "stuck, though every member can be reached")

    def break_off(self, group: Group) -> None:
        """A fault: this worker's own end of the group fails, though its process lives."""
        group.leave(self)
        self.broke(group, self.worker_id)

    def _probe(self, group: Group, otherwise: str) -> None:
        number = group.generation.number
        if self._probed < number:
            self._probed = number
            missing = group.unreachable(self)
            self.process.later(_UNREACHABLE_S if missing else _LOOK_S, self._looked, group, otherwise)

    def _looked(self, group: Group, otherwise: str) -> None:
        missing = group.unreachable(self)
        if group in (self.current, self.upcoming):
            detail = f"no connection to {', '.join(missing)}" if missing else otherwise
            self._say_broken(group, detail, (), missing)

    def _say_broken(self, group: Group, detail: str, missed: tuple[str, ...], unreachable: tuple[str, ...]) -> None:
        before = self.report.broken
        number = group.generation.number
        if before is not None and before.generation == number and not missed:
            missed = before.missed
        self.say(broken=Broken(generation=number, detail=detail, missed=missed, unreachable=unreachable))

    def take(self, group: Group, sender: str, message: Message) -> None:
        self.training.take(group, sender, message)
