"""Tellers: what a block of a story leads to, in words. One for the lighthouse, one for ``settle``."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import asdict, replace

from craft.decide.job.apply import apply, restarted
from craft.decide.job.observe import observe
from craft.decide.job.state import JobState
from craft.decide.policies import Policy, decide
from craft.decide.step.settle import LossAnswer, settle
from craft.decide.techniques import Loss, LossSettings, defaults
from craft.protocol.actions import AnyAction, Propose, Reconfigure
from craft.protocol.errors import ProtocolViolation, StateLost
from craft.protocol.events import (
    AlertFired,
    Answered,
    AnyEvent,
    ArrivalsEnded,
    AwaitExpired,
    CheckpointRequested,
    CheckpointRestored,
    CheckpointWritten,
    DrainExpired,
    DrainRequested,
    ExchangeBroken,
    GenerationEntered,
    GenerationStuck,
    HoldExpired,
    HostLost,
    HostSilent,
    LoopBegun,
    LoopEnded,
    PreemptExpired,
    PreemptRequested,
    ReplacementsEnded,
    ScriptEnded,
    StateDiverged,
    StateGone,
    StopRequested,
    WorkerCaughtUp,
    WorkerEnded,
    WorkerFailed,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerOverdue,
)
from craft.protocol.membership import DROPPED, Claim, Member
from craft.protocol.values.alerts import AlertAnswer

from .chronicle import Chronicle
from .story import Line


class Lighthouse:
    """observe, decide, apply; with what a real one would have made durable."""

    def __init__(self, policies: Callable[[LossAnswer], tuple[Policy, ...]] | None = None) -> None:
        """``policies``: by the answer to a loss; those of the defaults unless given."""
        self._state = JobState(slots=0)
        self._policies: tuple[Policy, ...] = ()
        self._choose = policies or (lambda answer: defaults(Loss(LossSettings(answer=answer))).policies())
        self.chronicle = Chronicle()
        """What the journal of the job would be, with a time for everything."""

    def __call__(self, lines: tuple[Line, ...]) -> list[str]:
        told = [text for line in lines for text in self._tell(line)]
        self.chronicle.wait(self._state)
        return told

    def _tell(self, line: Line) -> list[str]:
        if line.verb == "job":
            self.chronicle.begin()
            self._state = JobState(slots=line.number("slots") or 0, min_workers=line.number("min_workers", 1) or 0)
            self._policies = self._choose(msgspec.convert(line.text("on_loss", "redo"), LossAnswer))
            return _shown(self._state)
        if line.verb == "show":
            return _shown(self._state)
        if line.verb == "restart":
            self._state = restarted(self._state, self._state.generation)
            return _shown(self._state)
        return self._handle(_event(line))

    def _handle(self, event: AnyEvent) -> list[str]:
        self._state = observe(self._state, event)
        actions = decide(self._policies, self._state, event)
        told = [_event_text(event)]
        self.chronicle.write("event", event)
        for action in actions:
            self._state = apply(self._state, action, nonce="n")
            told.append(_action_text(action, self._state))
            self.chronicle.write("action", action)
        return told if actions else [*told, "nothing to do"]


def _event(line: Line) -> AnyEvent:
    worker, reason = line.text("worker"), line.text("reason", "killed by SIGKILL")
    match line.verb:
        case "join":
            late = line.text("late") == "yes"
            return WorkerJoined(member=Member(worker_id=worker, host=line.text("host", "h1"), late=late))
        case "lose":
            step = line.number("step")
            return WorkerLost(worker_id=worker, reason=reason, source=line.text("source", "agent"), step=step)
        case "lose-host":
            return HostLost(
                host=line.text("host"), reason=line.text("reason", "silent for 1.0 s"), step=line.number("step")
            )
        case "end":
            return WorkerEnded(worker_id=worker)
        case "fail":
            error = line.text("error", "ValueError: bad sample")
            step, microbatch = line.number("step"), line.number("microbatch")
            late, everywhere = line.text("late") == "yes", line.text("everywhere") == "yes"
            return WorkerFailed(
                worker_id=worker, error=error, traceback="...", step=step, microbatch=microbatch, late=late,
                everywhere=everywhere, refused=line.text("refused") == "yes",
            )  # fmt: skip
        case "finish":
            complete = line.text("complete", "yes") == "yes"
            return WorkerFinished(worker_id=worker, step=line.number("step") or 0, complete=complete)
        case "end-loop":
            return LoopEnded(worker_id=worker, step=line.number("step") or 0, loop=line.number("loop", 1) or 1)
        case "begin-loop":
            return LoopBegun(worker_id=worker, loop=line.number("loop") or 0)
        case "end-script":
            return ScriptEnded(worker_id=worker)
        case "enter":
            behind = line.text("behind") == "yes"
            return GenerationEntered(worker_id=worker, generation=line.number("generation") or 0, behind=behind)
        case "catch-up":
            return WorkerCaughtUp(worker_id=worker)
        case "silent":
            return HostSilent(host=line.text("host"), reason=line.text("reason", "no sign of life for 3 s"))
        case "answer":
            return Answered(worker_id=worker or None, host=line.text("host") or None)
        case "await-expires":
            return AwaitExpired(worker_id=worker or None, host=line.text("host") or None)
        case "break":
            unreachable = tuple(filter(None, line.text("unreachable").split("+")))
            missed = tuple(filter(None, line.text("missed").split("+")))
            number, step = line.number("generation") or 0, line.number("step")
            progress = () if step is None else (0, step, line.number("calls") or 0)
            return ExchangeBroken(
                worker_id=worker, generation=number, unreachable=unreachable, missed=missed, progress=progress
            )
        case "stuck":
            return GenerationStuck(generation=line.number("generation") or 0)
        case "diverge":
            return StateDiverged(step=line.number("step") or 0, detail=line.text("detail"), worker_ids=(worker,))
        case "leave":
            return WorkerLeft(worker_id=worker, step=line.number("step") or 0)
        case "drain":
            return DrainRequested(worker_id=worker or None, host=line.text("host") or None, reason=reason)
        case "drain-expires":
            return DrainExpired(worker_id=worker)
        case "hold-expires":
            return HoldExpired(generation=line.number("generation") or 0)
        case "nobody-else":
            return ArrivalsEnded(generation=line.number("generation") or 0)
        case "no-more-replacements":
            return ReplacementsEnded(host=line.text("host", "h1"), reason=reason)
        case "overdue":
            waiting = tuple(filter(None, line.text("waiting").split("+")))
            elsewhere = tuple(filter(None, line.text("elsewhere").split("+")))
            stopped = tuple(filter(None, line.text("stopped").split("+")))
            phase = line.text("phase", "computing")
            detail = f"{phase} for 12 s"
            return WorkerOverdue(
                worker_id=worker, phase=phase, step=line.number("step") or 0, elapsed_s=12.0, limit_s=10.0,
                detail=detail, waiting=waiting, elsewhere=elsewhere, stopped=stopped,
            )  # fmt: skip
        case "no-state":
            return StateGone(generation=line.number("generation") or 0)
        case "stop":
            return StopRequested(reason=line.text("reason"))
        case "preempt":
            return PreemptRequested(reason=line.text("reason", "SIGTERM"), deadline=line.number("deadline"))
        case "alert":
            answer = msgspec.convert(line.text("answer", "report"), AlertAnswer)
            return AlertFired(
                source="alertmanager", name="Xid", fingerprint="f1", reason="alert Xid", answer=answer,
                worker_id=worker or None, host=line.text("host") or None,
            )  # fmt: skip
        case "deadline":
            return PreemptExpired()
        case "want-checkpoint":
            return CheckpointRequested(reason=line.text("reason"), tag=line.text("tag") or None)
        case "written":
            step, branch = line.number("step") or 0, line.number("branch") or 0
            return CheckpointWritten(name=f"{branch}-{step}", branch=branch, step=step, url="checkpoints")
        case "begin-from":
            step, branch = line.number("step") or 0, line.number("branch") or 0
            return CheckpointRestored(name=line.text("name"), branch=branch, step=step, url="checkpoints")
    raise ValueError(f"no such verb in a story of the lighthouse: {line.verb}")


def _event_text(event: AnyEvent) -> str:
    fields: dict[str, object] = asdict(event)
    shown: dict[str, object] = {}
    if isinstance(event, WorkerJoined):
        shown = {"worker_id": event.member.worker_id, "host": event.member.host}
    hidden = (
        "member",
        "time",
        "traceback",
        "pid",
        "digest",
        "detail",
        "stack",
        "late",
        "refused",
        "everywhere",
        "hardware",
        "url",
        "seconds",
        "labels",
    )
    left_out: tuple[object, ...] = (None, (), False) if isinstance(event, GenerationEntered) else (None, ())
    shown |= {key: value for key, value in fields.items() if key not in hidden and value not in left_out}
    return f"event  {type(event).__name__} {_pairs(shown)}"


def _action_text(action: AnyAction, state: JobState) -> str:
    fields = {key: value for key, value in asdict(action).items() if key not in ("reason", "traceback", "again")}
    made = state.upcoming if isinstance(action, Propose) else state.generation
    if isinstance(action, Propose | Reconfigure) and made is not None:
        fields = {"generation": made.number, "members": _members(made.members)}
    return f'action {type(action).__name__} {_pairs(fields)}  "{action.reason}"'


def _members(members: tuple[Member, ...]) -> str:
    """Names in the order of ranks; one that came later than the others with the generation since which it is there."""
    names = (member.worker_id + (f"@{member.since}" if member.since else "") for member in members)
    return f"[{','.join(names)}]"


def _pairs(fields: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in fields.items())


def _shown(state: JobState) -> list[str]:
    fields: dict[str, object] = {"slots": state.slots, "min_workers": state.min_workers}
    if state.generation is not None:
        fields["generation"] = f"{state.generation.number}{_members(state.generation.members)}"
    if state.upcoming is not None:
        fields["upcoming"] = f"{state.upcoming.number}{_members(state.upcoming.members)}"
    if state.recovering:
        fields["recovering"] = "yes"
    if state.owed:
        fields["owed"] = ",".join(each.worker_id for each in state.owed)
    if state.finishing:
        fields["finishing"] = state.finishing
    if state.preempting is not None:
        fields["preempting"] = f"({state.preempting.reason}, until {state.preempting.deadline})"
    if state.restoration is not None:
        again = state.restoration
        fields["restoration"] = f"{again.number}({again.checkpoint}, branch {again.branch}, tries {again.tries})"
    if state.wishes:
        fields["wishes"] = ",".join(f"{wish.number}:{wish.tag}" for wish in state.wishes)
    views = [f"       {view.member.worker_id} {view.standing} entered={view.entered}" for view in state.workers]
    return [f"state  {_pairs(fields)}", *views]


class Settling:
    """``settle`` on one block: a line that begins with the verb, then one line for each member, in the order of ranks."""

    def __call__(self, lines: tuple[Line, ...]) -> list[str]:
        head, *members = lines
        steps, microbatches = head.number("steps", 100) or 0, head.number("microbatches") or 0
        claims = [_claim(line) for line in members]

        def size_of(step: int) -> int:
            return microbatches if step < steps else 0

        try:
            answer = settle(claims, size_of, msgspec.convert(head.text("on_loss", "redo"), LossAnswer))
        except (ProtocolViolation, StateLost) as violation:
            return [f"violation: {violation}"]
        told = [f"level={answer.step}"]
        if answer.commits:
            told.append(f"commit {','.join(answer.commits)}")
        for rank, claim in enumerate(claims):
            share = [microbatch for microbatch, owner in enumerate(answer.owners) if owner == rank]
            todo = set(share) - (set(claim.held) if claim.committed == answer.step else set())
            told.append(f"{claim.worker_id} owns={share}" + (f" computes={sorted(todo)}" if todo else ""))
        dropped = [microbatch for microbatch, owner in enumerate(answer.owners) if owner == DROPPED]
        told += [f"given out anew: {list(answer.given)}"] if answer.given else []
        told += [f"dropped: {dropped}"] if dropped else []
        return told


def _claim(line: Line) -> Claim:
    claim = Claim(
        worker_id=line.verb,
        committed=line.number("committed"),
        result=line.number("result"),
        held=line.numbers("held"),
        pending=line.numbers("pending"),
    )
    return replace(claim, committed=None) if line.text("joiner") == "yes" else claim
