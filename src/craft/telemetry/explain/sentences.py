"""Lines of the journal in plain words: what the display of a running job prints, and what ``craft status`` says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from craft.protocol.events import Recovered
from craft.telemetry.explain.phrases import brief, cost_words, counted

Line = dict[str, Any]


def sentence(line: Line) -> str:
    """One line of the journal for a person; empty if it is not worth their while."""
    say = _SENTENCES.get(_name(line))
    return say(line) if say is not None else ""


def detail(line: Line) -> str:
    """The same, also of what matters only to somebody who looks for a cause; empty if there are no words for it."""
    say = _SENTENCES.get(_name(line)) or _DETAILS.get(_name(line))
    return say(line) if say is not None else ""


def _name(line: Line) -> str:
    return str(line.get("event") or line.get("action") or line.get("outcome") or "")


def size(count: int) -> str:
    """A number of bytes, such as ``1.3 GB``."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def checkpoint(line: Line) -> str:
    """A complete checkpoint: ``step 120 (1.3 GB, 0.2 GB of it new, 3.1 s), tagged best``."""
    new, total = line["new_bytes"], line["total_bytes"]
    part = "all of it new" if new >= total else f"{size(new)} of it new"
    tag = f", tagged {line['tag']}" if line.get("tag") else ""
    return f"step {line['step']} ({size(total)}, {part}, {line['seconds']:.1f} s){tag}"


def work(recovered: Recovered | None) -> str:
    """What was done again after a loss, as the end of a line; empty if nothing was, or if nobody said."""
    if recovered is None:
        return ""
    redone = f", {counted(len(recovered.redone), recovered.redone_samples)} computed again" if recovered.redone else ""
    if not recovered.dropped:
        return redone
    return f"{redone}, {counted(len(recovered.dropped), recovered.dropped_samples)} dropped"


def clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


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
    return f"host {line['host']} starts no more workers in the place of lost ones: {line['reason']}"


def _failed_checkpoint(line: Line) -> str:
    what = f"{line['worker_id']} could not write its share of the checkpoint of step {line['step']}: {line['error']}"
    if line["retry_s"] is None:
        return f"{what} (given up after {line['tries']} tries: there will be no such checkpoint)"
    return f"{what} (try {line['tries']}; the next one in {line['retry_s']:.1f} s)"


def _preempted(line: Line) -> str:
    until = "" if line.get("deadline") is None else f", until {clock(line['deadline'])} at the latest"
    return f"makes room ({line['reason']}): takes a checkpoint at the next step boundary{until}"


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
    whom = line.get("worker_id") or (f"host {line['host']}" if line.get("host") else "the job")
    return f"{line['reason']} ({whom}): {line.get('note') or line['answer']}"


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


_SENTENCES: dict[str, Callable[[Line], str]] = {
    "WorkerLost": lambda line: f"{line['worker_id']} lost: {line['reason']}",
    "WorkerFailed": lambda line: f"{line['worker_id']} {_failing(line)}: {line['error']}",
    "WorkerLeft": lambda line: f"{line['worker_id']} left, as it was told",
    "HostLost": lambda line: f"host {line['host']} lost: {line['reason']}",
    "LighthouseStarted": _started,
    "FileDamaged": lambda line: f"warning: {line['file']} of the run directory was damaged: {line['detail']}",
    "ParametersUnequal": _unequal,
    "StateDiverged": lambda line: f"state diverged: {line['detail']}",
    "StepRetried": _retried,
    "ReplacementsEnded": _replacements,
    "CheckpointWritten": lambda line: f"checkpoint written: {checkpoint(line)}",
    "CheckpointSkipped": lambda line: f"no checkpoint at step {line['step']}: {line['reason']}",
    "CheckpointFailed": _failed_checkpoint,
    "CheckpointAbandoned": lambda line: f"no checkpoint of step {line['step']}: {line['reason']}",
    "CheckpointRejected": lambda line: f"checkpoint of step {line['step']} cannot be used: {line['reason']}",
    "CheckpointRestored": lambda line: f"goes on from the checkpoint of step {line['step']} in {line['url']}",
    "IntervalChosen": lambda line: f"a checkpoint every {line['interval_s']:.3g} s: {line['reason']}",
    "NumbersDiverged": lambda line: f"step {line['step']}: {line['what']}: {line['answer']}",
    "RolledBack": _rolled_back,
    "ConditionSeen": _condition,
    "TechniqueFailed": lambda line: (
        f"technique {line['technique']} failed and is left out from now on ({line['where']}): {line['error']}"
    ),
    "StragglerFound": _straggler,
    "WorkerPaused": lambda line: f"{line['worker_id']} was paused for {line['seconds']:.1f} s ({line['reason']})",
    "ScriptWarned": lambda line: f"warning: {line['text']}",
    "StartStepTaken": lambda line: f"begins at step {line['step']}, with what the script has loaded itself",
    "StragglerGone": lambda line: f"{line['worker_id']} is as fast as the others again",
    "AlertFired": _alert,
    "AlertResolved": lambda line: f"alert {line['name']} is resolved",
    "Recovered": lambda line: (
        f"step {line['step']} is committed, the first one since, in generation {line['generation']}"
    ),
    "Cost": lambda line: (
        f"{'the loss of ' + ', '.join(line['worker_ids']) if line['worker_ids'] else 'the broken exchange'} cost"
        f" {cost_words(line)}"
    ),
    "WindDown": lambda line: f"ends after the step in flight: {line['reason']}",
    "Preempt": _preempted,
    "TakeCheckpoint": _wanted,
    "Hold": lambda line: str(line["reason"]),
    "Restore": lambda line: str(line["reason"]),
    "Propose": lambda line: f"generation {line['generation']} is prepared: {line['reason']}",
    "Reconfigure": lambda line: f"generation {line['generation']}: {line['reason']}",
    "Await": lambda line: str(line["reason"]),
    "Answered": lambda line: f"{_subject(line)} answers again, and the job goes on",
}


def _subject(line: Line) -> str:
    return str(line.get("worker_id") or f"host {line.get('host')}")


def _joined(line: Line) -> str:
    member = line["member"]
    late = ", as a spare or in the place of a lost one" if member.get("late") else ""
    return f"{member['worker_id']} of host {member['host']} joined (process {line['pid']}){late}"


def _finished(line: Line) -> str:
    return f"{line['worker_id']} {'finished' if line['complete'] else 'ended'} at step {line['step']}"


def _overdue(line: Line) -> str:
    waiting = (
        f"; {', '.join(line['waiting'])} {'wait' if line['waiting'][1:] else 'waits'} for it"
        if line["waiting"]
        else "; nobody waits for it"
    )
    return f"{line['worker_id']} is overdue: {line['detail']}{waiting}"


def _injected(line: Line) -> str:
    return f"somebody has a fault injected into {line['worker_id'] or line['host'] or 'the job'}: {line['fault']}"


def _drain(line: Line) -> str:
    until = "" if line.get("deadline_s") is None else f", within {line['deadline_s']:g} s"
    return f"{line.get('worker_id') or 'host ' + str(line.get('host'))} is to leave{until}: {line['reason']}"


def _fault(line: Line) -> str:
    follows = f"; generation {line['next_generation']} follows" if line["next_generation"] is not None else ""
    return f"a fault hit generation {line['generation']}: {', '.join(line['worker_ids'])} lost{follows}"


_DETAILS: dict[str, Callable[[Line], str]] = {
    "WorkerJoined": _joined,
    "WorkerFinished": _finished,
    "LoopBegun": lambda line: f"{line['worker_id']} begins training loop {line['loop']}",
    "LoopEnded": lambda line: (
        f"{line['worker_id']} is done with training loop {line['loop']}, after step {line['step'] - 1}"
    ),
    "ScriptEnded": lambda line: f"{line['worker_id']} came to the end of its script",
    "WorkerOverdue": _overdue,
    "WorkerEnded": lambda line: f"the process of {line['worker_id']} is no more",
    "DrainRequested": _drain,
    "DrainExpired": lambda line: f"{line['worker_id']} was to leave, and is still there at its deadline",
    "ArrivalsEnded": lambda line: "no other worker is on the way to begin again",
    "HoldExpired": lambda line: f"nobody came in the place of those lost from generation {line['generation']}",
    "StateGone": lambda line: f"no member of generation {line['generation']} has the training state",
    "TimesMeasured": _measured,
    "ExchangeBroken": lambda line: (
        f"{line['worker_id']} says that its exchange in generation {line['generation']} broke: {brief(line['detail'])}"
    ),
    "GenerationStuck": lambda line: f"generation {line['generation']} is still broken",
    "WorkerCaughtUp": lambda line: f"{line['worker_id']} has the training state, and keeps pace with the others",
    "HostSilent": lambda line: f"host {line['host']} is silent: {line['reason']}",
    "AwaitExpired": lambda line: f"{_subject(line)} has not answered within the limit",
    "GenerationEntered": lambda line: f"{line['worker_id']} acts under generation {line['generation']}",
    "FaultInjected": _injected,
    "AbortRequested": lambda line: f"somebody wants all workers out of what they are blocked in: {line['reason']}",
    "StopRequested": lambda line: f"somebody wants the job to end: {line['reason']}",
    "LighthouseAlone": lambda line: f"no host is heard for {line['silent_s']:g} s",
    "LighthouseHeard": lambda line: f"host {line['host']} is heard again, after {line['alone_s']:g} s",
    "Fault": _fault,
    "Fence": lambda line: f"{line['worker_id']} is to be ended: {line['reason']}",
    "Release": lambda line: f"{line['worker_id']} may go: {line['reason']}",
    "DeclareLost": lambda line: f"{line['worker_id']} is taken for lost: {line['reason']}",
    "DeclareHostLost": lambda line: f"host {line['host']} is taken for lost: {line['reason']}",
    "Drain": _drain,
    "RequestDrain": _drain,
    "Probe": lambda line: f"members of generation {line['generation']} find out whom they reach: {line['reason']}",
    "Watch": lambda line: f"generation {line['generation']} is looked at again in a moment: {line['reason']}",
    "Stop": lambda line: f"the job ends with exit code {line['exit_code']}: {line['reason']}",
}
"""Beside the sentences above: what ``craft events`` says, and the display of a running job does not."""
