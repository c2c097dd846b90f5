"""Find what a job waited for, and how long, in its journal: each wait is a reason why no step was committed.

``liveness`` calls it with the lines of a journal in the order of time. A wait justifies no more than its own limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

Line = dict[str, Any]

_SEEN_S = 1.0
"""At most from the end of a limit until the journal says so: agents look ten times a second, and collect stacks first."""
_AWAY_S = 10.0
"""A lighthouse that was killed or stopped is replaced in less than this."""
_WAITING = frozenset({"exchanging", "calling"})
_PROBED_S = 15.0
"""Members that test whom they reach take no longer."""
_SILENCE = re.compile(r"\bfor (\d+(?:\.\d+)?) s\b")
_ARRIVALS = frozenset({"WorkerJoined", "WorkerEnded", "WorkerLost", "WorkerFailed", "HostLost", "ReplacementsEnded"})
"""Events that the first generation after a restore may have waited for."""
_OF_THE_LIGHTHOUSE = frozenset({"kill-lighthouse", "stop-lighthouse", "restart-lighthouse"})


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a job waited for."""

    begin: float
    """In seconds since 1970."""
    end: float
    why: str


def name_of(line: Line) -> str:
    """Return the name of the event, action or outcome."""
    return str(line[line["kind"]])


def waits(journal: Sequence[Line], first_step_s: float = 0.0) -> Iterator[Wait]:
    """Yield what the journal says was waited for; ``first_step_s``: how long the first step of a process may take."""
    for index, line in enumerate(journal):
        rule = _RULES.get(name_of(line))
        if rule is not None:
            yield from rule(line, journal[index + 1 :])
    if first_step_s:
        yield from _first_steps(journal, first_step_s)


def _time(line: Line) -> float:
    return float(line["time"])


def _until(names: Collection[str], lines: Sequence[Line]) -> float:
    """Return when the first line of one of these names was written."""
    return next((_time(line) for line in lines if name_of(line) in names), math.inf)


def _overdue(line: Line, after: Sequence[Line]) -> Iterator[Wait]:
    """A limit had to expire before a worker counted as hanging.

    A worker that waits for the others does not delay them, unless a link carries nothing.
    """
    if line["phase"] in _WAITING and not any(_is_cut(each) for each in after if _time(each) < _time(line) + _PROBED_S):
        return
    length_s = min(float(line["elapsed_s"]), float(line["limit_s"]) + _SEEN_S)
    why = f"the limit for {line['worker_id']} ({line['phase']}, {line['limit_s']:g} s) had to expire"
    yield Wait(begin=_time(line) - length_s, end=_time(line), why=why)


def _is_cut(line: Line) -> bool:
    return bool(name_of(line) == "ExchangeBroken" and line.get("unreachable"))


def _silent(line: Line, _: Sequence[Line]) -> Iterator[Wait]:
    """A host or a worker was silent for a limit that had to expire."""
    found = _SILENCE.search(str(line.get("reason", "")))
    if found is not None and (line["event"] != "WorkerLost" or line["source"] == "heartbeat"):
        who = line.get("host") or line.get("worker_id")
        yield Wait(
            begin=_time(line) - float(found[1]), end=_time(line), why=f"the silence of {who} had to last {found[1]} s"
        )


def _hold(line: Line, after: Sequence[Line]) -> Iterator[Wait]:
    """The job waits for a replacement of a lost worker."""
    end = min(_time(line) + float(line["limit_s"]), _until({"Reconfigure", "Restore", "Stop", "HoldExpired"}, after))
    yield Wait(begin=_time(line), end=end, why=f"held until a lost worker is replaced: {line['reason']}")


def _restore(line: Line, after: Sequence[Line]) -> Iterator[Wait]:
    """A job that begins again waits for its workers: until the last of the events that it had to wait for."""
    limit = _time(line) + float(line["limit_s"])
    end = min(limit, _until({"Reconfigure", "Stop", "Restore"}, after))
    last = max((_time(each) for each in after if name_of(each) in _ARRIVALS and _time(each) <= end), default=None)
    if last is not None:
        yield Wait(begin=_time(line), end=last, why=f"restoring, waiting for workers: {line['reason']}")


def _await(line: Line, after: Sequence[Line]) -> Iterator[Wait]:
    """The only holder of the state is silent."""
    who = line.get("worker_id") or line.get("host")
    about = [each for each in after if name_of(each) in ("Answered", "AwaitExpired")]
    ends = (_time(each) for each in about if who in (each.get("worker_id"), each.get("host")))
    limit = math.inf if line["limit_s"] is None else _time(line) + float(line["limit_s"])
    yield Wait(
        begin=_time(line), end=min(limit, next(ends, math.inf)), why=f"waiting for {who}, which has the last copy"
    )


def _injected(line: Line, after: Sequence[Line]) -> Iterator[Wait]:
    """Without a lighthouse, nothing is decided."""
    if line["fault"] in _OF_THE_LIGHTHOUSE:
        end = min(_time(line) + _AWAY_S, _until({"LighthouseStarted"}, after))
        yield Wait(begin=_time(line), end=end, why="no lighthouse was there")


def _alone(line: Line, after: Sequence[Line]) -> Iterator[Wait]:
    end = _until({"LighthouseHeard", "LighthouseStarted"}, after)
    yield Wait(begin=_time(line) - float(line["silent_s"]), end=end, why="the lighthouse heard no host at all")


def _loop_ended(line: Line, after: Sequence[Line]) -> Iterator[Wait]:
    end = _until({"LoopBegun"}, after)
    yield Wait(begin=_time(line), end=end, why="a training loop was over, and the next had not begun")


def _paused(line: Line, _: Sequence[Line]) -> Iterator[Wait]:
    """A worker was in ``job.paused``, or in an unlimited operation of CRAFT; it reports that afterwards."""
    why = f"{line['worker_id']} was paused: {line['reason']}"
    end = float(line.get("seen") or line["time"])
    yield Wait(begin=end - float(line["seconds"]), end=end, why=why)


def _first_steps(journal: Sequence[Line], first_step_s: float) -> Iterator[Wait]:
    """A worker that enters its first generation may compile in its first step."""
    known: set[str] = set()
    for line in journal:
        if name_of(line) == "GenerationEntered" and line["worker_id"] not in known:
            known.add(line["worker_id"])
            why = f"the first step of {line['worker_id']}, which may compile"
            yield Wait(begin=_time(line), end=_time(line) + first_step_s, why=why)


_RULES: dict[str, Callable[[Line, Sequence[Line]], Iterator[Wait]]] = {
    "WorkerOverdue": _overdue,
    "WorkerLost": _silent,
    "HostLost": _silent,
    "HostSilent": _silent,
    "Hold": _hold,
    "Restore": _restore,
    "Await": _await,
    "FaultInjected": _injected,
    "LighthouseAlone": _alone,
    "LoopEnded": _loop_ended,
    "WorkerPaused": _paused,
}
