"""Lines of the journal and of workers' files as parts of a story: who saw, decided or did what. For ``timeline``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from craft.protocol.generation_log import Entered
from craft.telemetry.explain.incidents import Line

LIGHTHOUSE = "lighthouse"
_SOURCE = re.compile(r"generation \d+: |\[/[^\]]*\] ")


def cost_words(cost: Line, retried: Sequence[int] = ()) -> str:
    """``43 ms, step 11 taken up again, 2 microbatches (8 samples) computed again``."""
    lost = "an unknown time (no step was committed before)"
    if cost["lost_ms"] is not None:
        lost = f"{cost['lost_ms']:.0f} ms"
    if cost.get("steps_lost"):
        steps = f"{cost['steps_lost']} step{'' if cost['steps_lost'] == 1 else 's'}"
        return f"{lost}, {steps} that were committed computed once more ({counted(cost['microbatches_redone'], None)})"
    step = f"step {', '.join(map(str, retried))}" if retried else "a step"
    again = f"{step} taken up again" if cost["steps_retried"] else "no step taken up again"
    redone = counted(cost["microbatches_redone"], cost["samples_redone"])
    parts = [lost, again, f"{redone} computed again"]
    if cost["microbatches_dropped"]:
        parts.append(f"{counted(cost['microbatches_dropped'], cost['samples_dropped'])} dropped")
    return ", ".join(parts)


def counted(microbatches: int, samples: int | None) -> str:
    """``2 microbatches (8 samples)``."""
    if not microbatches:
        return "no microbatch"
    plural = "" if microbatches == 1 else "es"
    inside = "" if samples is None else f" ({samples} sample{'' if samples == 1 else 's'})"
    return f"{microbatches} microbatch{plural}{inside}"


def numbered(numbers: Sequence[int]) -> str:
    return f"microbatch{'' if len(numbers) == 1 else 'es'} {', '.join(map(str, numbers))}"


def told(entry: Entered) -> str:
    if entry.aborted is None:
        return f"is told of generation {entry.generation}"
    return (
        f"is told of generation {entry.generation}, aborts its exchange in {1000 * (entry.aborted - entry.told):.1f} ms"
    )


def settled(entry: Entered, worker_id: str) -> str:
    if entry.guest:
        return "is through with it; how the step goes on is up to its own loop"
    others = len(entry.members) - 1
    met = f"has met {'the other one' if others == 1 else f'{others} others'}" if others else "is alone"
    if worker_id in entry.joiners:
        return f"{met} and takes their state"
    step = "commits what it has in hand" if entry.commits else ""
    if entry.dropped:
        course = f"step {entry.step} goes on without {numbered(entry.dropped)}"
    elif entry.given:
        own = f", and this one computes {', '.join(map(str, entry.mine))}" if entry.mine else ""
        course = f"step {entry.step} goes on, {numbered(entry.given)} nobody has{own}"
    elif entry.again:
        course = f"step {entry.step} is computed again"
    elif entry.retried:
        course = f"step {entry.step} goes on, all that was computed is still there"
    else:
        course = f"step {entry.step} begins"
    return f"{met} and settled: {' and '.join(filter(None, (step, course)))}"


def _lost(line: Line, agent: str) -> tuple[str, str]:
    worker_id, reason = line["worker_id"], line["reason"]
    return {
        "agent": (agent, f"sees {worker_id} end: {reason}"),
        "heartbeat": (LIGHTHOUSE, f"hears nothing of {worker_id} any more: {reason}"),
        "watch": (LIGHTHOUSE, f"declares {worker_id} lost, since others wait for it: {reason}"),
        "peers": (LIGHTHOUSE, f"declares {worker_id} lost by what the others say: {reason}"),
        "drain": (LIGHTHOUSE, f"declares {worker_id} lost, which was to leave: {reason}"),
        "alert": (LIGHTHOUSE, f"declares {worker_id} lost because of an alert: {reason}"),
        "api": ("somebody", f"says that {worker_id} failed: {reason}"),
    }.get(line.get("source", ""), (LIGHTHOUSE, f"takes {worker_id} for lost: {reason}"))


def _overdue(line: Line, agent: str) -> tuple[str, str]:
    waiting = (
        f"; {', '.join(line['waiting'])} {'wait' if line['waiting'][1:] else 'waits'} for it"
        if line.get("waiting")
        else ""
    )
    return agent, f"finds that {line['worker_id']} hangs: {line['detail']}{waiting}"


def _injected(line: Line, agent: str) -> tuple[str, str]:
    return "somebody", f"has a fault injected into {line.get('worker_id') or line.get('host')}: {line['fault']}"


def _failed(line: Line, agent: str) -> tuple[str, str]:
    where = "" if line.get("step") is None else f" in step {line['step']}"
    return line["worker_id"], f"fails{where}: {line['error']}"


def _broken(line: Line, agent: str) -> tuple[str, str]:
    if line.get("unreachable"):
        return line["worker_id"], f"cannot connect to {', '.join(line['unreachable'])}"
    if line["detail"].startswith("stuck"):
        return line["worker_id"], "finds nobody out of its reach"
    return line[
        "worker_id"
    ], f"says that its exchange in generation {line['generation']} broke: {brief(line['detail'])}"


def brief(detail: str) -> str:
    """What a library says of a broken connection, without where in its source and what it guesses."""
    text = _SOURCE.sub("", detail)
    return text.partition(" This is typically")[0].rstrip(". ")


def _decided(line: Line, agent: str) -> tuple[str, str]:
    return (
        LIGHTHOUSE,
        f"decides: generation {line['generation']} of {', '.join(line['members'])}, because {line['reason']}",
    )


TELLINGS: dict[str, Callable[[Line, str], tuple[str, str]]] = {
    "FaultInjected": _injected,
    "AlertFired": lambda line, _: (LIGHTHOUSE, f"takes an alert: {line['reason']}"),
    "WorkerOverdue": _overdue,
    "WorkerLost": _lost,
    "WorkerFailed": _failed,
    "WorkerFinished": lambda line, agent: (agent, f"sees {line['worker_id']} end by itself, at step {line['step']}"),
    "HostLost": lambda line, _: (LIGHTHOUSE, f"takes host {line['host']} for lost: {line['reason']}"),
    "ExchangeBroken": _broken,
    "GenerationStuck": lambda line, _: (LIGHTHOUSE, f"finds generation {line['generation']} still broken"),
    "StateGone": lambda line, _: ("members", f"find that none of generation {line['generation']} has the state"),
    "LighthouseStarted": lambda line, _: (LIGHTHOUSE, "is started again" if line.get("restarted") else "is started"),
    "Reconfigure": _decided,
    "Fence": lambda line, _: (LIGHTHOUSE, f"has {line['worker_id']} ended: {line['reason']}"),
    "Hold": lambda line, _: (LIGHTHOUSE, f"decides to wait, up to {line['limit_s']:g} s: {line['reason']}"),
    "Restore": lambda line, _: (LIGHTHOUSE, f"decides: {line['reason']}"),
    "CheckpointRestored": lambda line, _: ("members", f"go on from the checkpoint of step {line['step']}"),
    "Probe": lambda line, _: (LIGHTHOUSE, f"asks all whom they reach: {line['reason']}"),
    "Stop": lambda line, _: (LIGHTHOUSE, f"ends the job with exit code {line['exit_code']}: {line['reason']}"),
    "Propose": lambda line, _: (LIGHTHOUSE, f"prepares generation {line['generation']}: {line['reason']}"),
}
