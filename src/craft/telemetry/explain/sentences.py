"""Turn journal lines into English: one table by event, action and outcome, with two renderings.

``sentence`` is for the display of a running job, ``detail`` for ``craft events``, ``deed`` for the timelines of ``craft why``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from craft.telemetry.explain.amounts import Line, checkpoint, clock, cost_words, count

_SOURCE = re.compile(r"generation \d+: |\[/[^\]]*\] ")


Words = str | Callable[[Line], str]
"""A template with fields of the line, or a function of it."""


class Wording(NamedTuple):
    """The words for all lines of one name."""

    sentence: Words
    shown: bool = False
    """Whether the display of a running job prints it."""
    deed: tuple[Words, Words] | Callable[[Line], tuple[Words, Words]] | None = None
    """Who did what, for timelines; None: they leave it out. ``{agent}`` stands for the agent of the worker."""


def sentence(line: Line) -> str:
    """Return a journal line for the display of a running job; empty if the display leaves it out."""
    wording = WORDINGS.get(_name(line))
    return _render(wording.sentence, line) if wording is not None and wording.shown else ""


def detail(line: Line) -> str:
    """Return a journal line for a reader who looks for a cause; empty if there are no words for it."""
    wording = WORDINGS.get(_name(line))
    return _render(wording.sentence, line) if wording is not None else ""


def deed(line: Line, agent: str) -> tuple[str, str] | None:
    """Return who did what according to a line; ``agent`` is that of its worker. None: not part of a timeline."""
    wording = WORDINGS.get(_name(line))
    if wording is None or wording.deed is None:
        return None
    who, what = wording.deed(line) if callable(wording.deed) else wording.deed
    return _render(who, {**line, "agent": agent}), _render(what, line)


def _render(words: Words, line: Line) -> str:
    return words.format_map(line) if isinstance(words, str) else words(line)


def brief(detail: str) -> str:
    """Return a library's message about a broken connection without source locations and guesses."""
    text = _SOURCE.sub("", detail)
    return text.partition(" This is typically")[0].rstrip(". ")


def _name(line: Line) -> str:
    return str(line.get("event") or line.get("action") or line.get("outcome") or "")


def _failing(line: Line) -> str:
    if not line.get("refused"):
        return "failed in its script"
    return "cannot start" if line.get("step") is None else "is refused"


def _started(line: Line) -> str:
    return "the lighthouse was started again" if line.get("restarted") else ""


def _unequal(line: Line) -> str:
    workers = ", ".join(line["worker_ids"])
    return f"warning: {workers} began with other parameters; all now have those of {line['source']}"


def _retried(line: Line) -> str:
    redone, dropped = line.get("given"), line.get("dropped")
    if redone:
        return f"step {line['step']}: microbatches {redone} are redone"
    return f"microbatches {dropped} are dropped"


def _replacements(line: Line) -> str:
    if line["reason"].startswith("--max-restarts is 0"):
        return ""
    return f"host {line['host']} does not replace lost workers any more: {line['reason']}"


def _failed_checkpoint(line: Line) -> str:
    what = f"{line['worker_id']} could not write its share of the checkpoint of step {line['step']}: {line['error']}"
    if line["retry_s"] is None:
        return f"{what} (given up after {line['tries']} tries: there will be no such checkpoint)"
    return f"{what} (try {line['tries']}; the next one in {line['retry_s']:.1f} s)"


def _preempted(line: Line) -> str:
    until = "" if line.get("deadline") is None else f", until {clock(line['deadline'])} at the latest"
    return f"preempted ({line['reason']}): takes a checkpoint at the next step boundary{until}"


def _wanted(line: Line) -> str:
    tag = f" {line['tag']}" if line.get("tag") else ""
    return f"checkpoint{tag} at the next step boundary: {line['reason']}"


def _rolled_back(line: Line) -> str:
    skipped = f", without the data of {count(line['skipped'], 'step')}" if line["skipped"] else ""
    return f"rolled back from step {line['left_at']} to step {line['step']}{skipped}: {line['reason']}"


def _straggler(line: Line) -> str:
    then = {
        "rebalance": ": microbatches move to the others",
        "drain": ": microbatches move to the others, and it is to leave",
    }
    return (
        f"{line['worker_id']} is slow: a microbatch takes {line['own_ms']:.3g} ms there and {line['others_ms']:.3g} ms"
        f" elsewhere, {line['ratio']:.2g} times as long, over {line['steps']} steps{then.get(line['answer'], '')}"
    )


def _alert(line: Line) -> str:
    return f"{line['reason']} ({_subject(line)}): {line.get('note') or line['answer']}"


def _condition(line: Line) -> str:
    value = "" if line.get("value") is None else f" ({line['value']:g})"
    detail = f": {line['detail']}" if line.get("detail") else ""
    return f"{line['technique']} saw {line['what']}{value} on {line['worker_id']}{detail}"


def _measured(line: Line) -> str:
    steps = (
        ", ".join(f"{seconds:.2g} s with {count(members, 'worker')}" for members, seconds in line["step_s"])
        or "not measured yet"
    )
    return f"after {count(line['step'], 'step')}, of which each takes: {steps}"


def _cost(line: Line) -> str:
    subject = f"the loss of {', '.join(line['worker_ids'])}" if line["worker_ids"] else "the broken exchange"
    return f"{subject} cost {cost_words(line)}"


def _subject(line: Line) -> str:
    return str(line.get("worker_id") or (f"host {line['host']}" if line.get("host") else "the job"))


def _joined(line: Line) -> str:
    member = line["member"]
    late = ", as a spare or a replacement" if member.get("late") else ""
    return f"{member['worker_id']} of host {member['host']} joined (process {line['pid']}){late}"


def _finished(line: Line) -> str:
    return f"{line['worker_id']} {'finished' if line['complete'] else 'ended'} at step {line['step']}"


def _waiting(line: Line) -> str:
    waiting = line.get("waiting")
    return f"; {', '.join(waiting)} {'wait' if waiting[1:] else 'waits'} for it" if waiting else ""


def hangs(line: Line, verb: str = "hangs") -> str:
    """Return which worker hangs, according to a ``WorkerOverdue``, and who waits for it."""
    return f"{line['worker_id']} {verb}: {line['detail']}{_waiting(line) or '; no worker waits for it'}"


def _injected(line: Line) -> str:
    return f"fault injected into {_subject(line)}: {line['fault']}"


def _drain(line: Line) -> str:
    until = "" if line.get("deadline_s") is None else f", within {line['deadline_s']:g} s"
    return f"{_subject(line)} is to leave{until}: {line['reason']}"


def _fault(line: Line) -> str:
    follows = f"; generation {line['next_generation']} follows" if line["next_generation"] is not None else ""
    return f"a fault hit generation {line['generation']}: {', '.join(line['worker_ids'])} lost{follows}"


_LOST = {
    "agent": ("{agent}", "sees {worker_id} end: {reason}"),
    "heartbeat": ("lighthouse", "no longer hears from {worker_id}: {reason}"),
    "watch": ("lighthouse", "declares {worker_id} lost, since others wait for it: {reason}"),
    "peers": ("lighthouse", "declares {worker_id} lost, by reports of its peers: {reason}"),
    "drain": ("lighthouse", "declares {worker_id} lost, which was to leave: {reason}"),
    "alert": ("lighthouse", "declares {worker_id} lost because of an alert: {reason}"),
    "api": ("API", "reports that {worker_id} failed: {reason}"),
}
"""Who declared a worker lost, and how, by the ``source`` of the line."""


def _lost(line: Line) -> tuple[Words, Words]:
    return _LOST.get(line.get("source", ""), ("lighthouse", "declares {worker_id} lost: {reason}"))


def _fails(line: Line) -> str:
    where = "" if line.get("step") is None else f" in step {line['step']}"
    return f"fails{where}: {line['error']}"


def _reports_broken(line: Line) -> str:
    if line.get("unreachable"):
        return f"cannot connect to {', '.join(line['unreachable'])}"
    if line["detail"].startswith("stuck"):
        return "can reach every member"
    return f"reports that its exchange in generation {line['generation']} broke: {brief(line['detail'])}"


def _decided(line: Line) -> str:
    return f"decides: generation {line['generation']} of {', '.join(line['members'])}, because {line['reason']}"


WORDINGS: dict[str, Wording] = {
    "WorkerLost": Wording("{worker_id} lost: {reason}", shown=True, deed=_lost),
    "WorkerFailed": Wording(
        lambda line: f"{line['worker_id']} {_failing(line)}: {line['error']}", shown=True, deed=("{worker_id}", _fails)
    ),
    "WorkerLeft": Wording("{worker_id} left as requested", shown=True),
    "HostLost": Wording(
        "host {host} lost: {reason}", shown=True, deed=("lighthouse", "declares host {host} lost: {reason}")
    ),
    "LighthouseStarted": Wording(
        _started, shown=True, deed=("lighthouse", lambda line: "restarts" if line.get("restarted") else "starts")
    ),
    "FileDamaged": Wording("warning: {file} of the run directory was damaged: {detail}", shown=True),
    "ParametersUnequal": Wording(_unequal, shown=True),
    "StateDiverged": Wording("state diverged: {detail}", shown=True),
    "StepRetried": Wording(_retried, shown=True),
    "ReplacementsEnded": Wording(_replacements, shown=True),
    "ReplacementsResumed": Wording("{host} starts replacements again", shown=True),
    "CheckpointWritten": Wording(lambda line: f"checkpoint written: {checkpoint(line)}", shown=True),
    "CheckpointSkipped": Wording("no checkpoint at step {step}: {reason}", shown=True),
    "CheckpointFailed": Wording(_failed_checkpoint, shown=True),
    "CheckpointAbandoned": Wording("no checkpoint of step {step}: {reason}", shown=True),
    "CheckpointRejected": Wording("checkpoint of step {step} cannot be used: {reason}", shown=True),
    "CheckpointRestored": Wording(
        "goes on from the checkpoint of step {step} in {url}",
        shown=True,
        deed=("members", "go on from the checkpoint of step {step}"),
    ),
    "IntervalChosen": Wording("a checkpoint every {interval_s:.3g} s: {reason}", shown=True),
    "NumbersDiverged": Wording("step {step}: {what}: {answer}", shown=True),
    "RolledBack": Wording(_rolled_back, shown=True),
    "ConditionSeen": Wording(_condition, shown=True),
    "TechniqueFailed": Wording(
        "technique {technique} failed and is left out from now on ({where}): {error}", shown=True
    ),
    "StragglerFound": Wording(_straggler, shown=True),
    "WorkerPaused": Wording("{worker_id} was paused for {seconds:.1f} s ({reason})", shown=True),
    "ScriptWarned": Wording("warning: {text}", shown=True),
    "StartStepTaken": Wording("begins at step {step}, with what the script has loaded itself", shown=True),
    "StragglerGone": Wording("{worker_id} is as fast as the others again", shown=True),
    "AlertFired": Wording(_alert, shown=True, deed=("lighthouse", "takes an alert: {reason}")),
    "AlertResolved": Wording("alert {name} is resolved", shown=True),
    "Recovered": Wording("step {step} is committed, the first one since, in generation {generation}", shown=True),
    "Cost": Wording(_cost, shown=True),
    "WindDown": Wording("ends after the step in flight: {reason}", shown=True),
    "Preempt": Wording(_preempted, shown=True),
    "TakeCheckpoint": Wording(_wanted, shown=True),
    "Hold": Wording("{reason}", shown=True, deed=("lighthouse", "decides to wait, up to {limit_s:g} s: {reason}")),
    "Restore": Wording("{reason}", shown=True, deed=("lighthouse", "decides: {reason}")),
    "Propose": Wording(
        "generation {generation} is prepared: {reason}",
        shown=True,
        deed=("lighthouse", "prepares generation {generation}: {reason}"),
    ),
    "Reconfigure": Wording("generation {generation}: {reason}", shown=True, deed=("lighthouse", _decided)),
    "Await": Wording("{reason}", shown=True),
    "Answered": Wording(lambda line: f"{_subject(line)} answers again, and the job goes on", shown=True),
    "WorkerJoined": Wording(_joined),
    "WorkerFinished": Wording(_finished, deed=("{agent}", "sees {worker_id} end by itself, at step {step}")),
    "LoopBegun": Wording("{worker_id} begins training loop {loop}"),
    "LoopEnded": Wording(
        lambda line: f"{line['worker_id']} is done with training loop {line['loop']}, after step {line['step'] - 1}"
    ),
    "ScriptEnded": Wording("{worker_id} came to the end of its script"),
    "WorkerOverdue": Wording(
        lambda line: hangs(line, "is overdue"),
        deed=("{agent}", lambda line: f"finds that {line['worker_id']} hangs: {line['detail']}{_waiting(line)}"),
    ),
    "WorkerEnded": Wording("the process of {worker_id} ended"),
    "DrainRequested": Wording(_drain),
    "DrainExpired": Wording("{worker_id} has not left by its deadline"),
    "ArrivalsEnded": Wording("no other worker is on the way to begin again"),
    "HoldExpired": Wording("no replacement arrived for those lost from generation {generation}"),
    "StateGone": Wording(
        "no member of generation {generation} has the training state",
        deed=("members", "find that none of generation {generation} has the state"),
    ),
    "TimesMeasured": Wording(_measured),
    "ExchangeBroken": Wording(
        lambda line: f"{line['worker_id']} {_reports_broken(line)}", deed=("{worker_id}", _reports_broken)
    ),
    "GenerationStuck": Wording(
        "generation {generation} is still broken", deed=("lighthouse", "finds generation {generation} still broken")
    ),
    "WorkerCaughtUp": Wording("{worker_id} has the training state and keeps pace with the others"),
    "HostSilent": Wording("host {host} is silent: {reason}"),
    "AwaitExpired": Wording(lambda line: f"{_subject(line)} has not answered within the limit"),
    "GenerationEntered": Wording("{worker_id} entered generation {generation}"),
    "FaultInjected": Wording(
        _injected, deed=("chaos", lambda line: f"injects a fault into {_subject(line)}: {line['fault']}")
    ),
    "AbortRequested": Wording("abort of all blocked workers requested: {reason}"),
    "StopRequested": Wording("stop of the job requested: {reason}"),
    "LighthouseAlone": Wording("no host has been heard for {silent_s:g} s"),
    "LighthouseHeard": Wording("host {host} is heard again, after {alone_s:g} s"),
    "Fault": Wording(_fault),
    "Fence": Wording("{worker_id} is to be ended: {reason}", deed=("lighthouse", "ends {worker_id}: {reason}")),
    "MoveSpare": Wording("{worker_id} ends and is started again at position {position}: {reason}", shown=True),
    "Release": Wording("{worker_id} may leave: {reason}"),
    "DeclareLost": Wording("{worker_id} is declared lost: {reason}"),
    "DeclareHostLost": Wording("host {host} is declared lost: {reason}"),
    "Drain": Wording(_drain),
    "RequestDrain": Wording(_drain),
    "Probe": Wording(
        "members of generation {generation} test whom they reach: {reason}",
        deed=("lighthouse", "asks all members whom they reach: {reason}"),
    ),
    "Watch": Wording("generation {generation} is checked again in a moment: {reason}"),
    "Stop": Wording(
        "the job ends with exit code {exit_code}: {reason}",
        deed=("lighthouse", "ends the job with exit code {exit_code}: {reason}"),
    ),
}
