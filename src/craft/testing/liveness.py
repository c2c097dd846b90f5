"""Check on the files of a run that it never stood still without a reason.

    python -m craft.testing.liveness RUN [--host DIR]... [--journal FILE]... [--limit SECONDS] [--exit-code N]

A *pause* is the time between two commits, or from the last one to the end of the job. The journal justifies parts of it (a
limit that had to expire, a restore whose workers are on their way); ``waits`` knows all reasons. The rest must not exceed the
limit, which starts anew when a worker or host is killed on purpose. Exit code 0: every pause is justified, and the job went
on after its last fault, or ended; 1: each violation is on standard output, with the lines of the journal around it; 2: bad
input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from craft.protocol.errors import ConfigError
from craft.telemetry.explain.amounts import precise_clock
from craft.telemetry.history import Run
from craft.telemetry.records.journal_reader import read_journal
from craft.telemetry.text.plain_text import indented, one_line
from craft.testing.branches import by_place
from craft.testing.history import read_job
from craft.testing.waits import Line, Wait, name_of, waits

LIMIT_S = 5.0
"""Limit of an unjustified pause."""
_EXPLAINED = frozenset(
    {"slow", "drain", "end-host", "hang", "stop", "kill-lighthouse", "stop-lighthouse", "restart-lighthouse"}
)
"""Faults that delay no worker, or only as long as other lines of the journal say: they do not restart the limit."""
_BEFORE_S = 2.0
_SHOWN = 24
_WIDTH = 220
_REASONS = 3
"""Number of reasons that are named, the longest first."""


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which no step was committed."""

    begin: float
    """In seconds since 1970."""
    end: float
    step: int | None
    """The step committed before it; None: before the first one."""
    waits: tuple[Wait, ...] = ()
    """What the job waited for according to the journal, cut to the pause."""
    unjustified_s: float = 0.0
    """The longest unjustified part between kills on purpose."""

    @property
    def length_s(self) -> float:
        return self.end - self.begin

    @property
    def reason(self) -> str:
        """What was waited for, in words."""
        whys = dict.fromkeys(wait.why for wait in self.waits)
        lengths = {
            why: _covered([wait for wait in self.waits if wait.why == why], self.begin, self.end) for why in whys
        }
        longest = sorted(lengths, key=lambda why: -lengths[why])[:_REASONS]
        return "; ".join(f"{why} ({lengths[why]:.1f} s)" for why in longest) or "the journal gives no reason"


class LivenessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check."""

    longest: Pause | None
    """The longest pause between two commits; None: there are no two."""
    pauses: tuple[Pause, ...]
    """All that are longer than the limit, justified or not."""
    violations: tuple[str, ...]
    """Some lines each, the first of them a sentence; empty if the job was live."""


def check(
    run_dir: Path,
    hosts: Sequence[Path] = (),
    journals: Sequence[Path] = (),
    *,
    limit_s: float = LIMIT_S,
    first_step_s: float = 0.0,
    exit_code: int | None = None,
) -> LivenessReport:
    """Check the files of a run that has ended for pauses that the journal does not justify.

    ``hosts``: as for ``history.check``. ``journals`` are further files in the format of the journal, such as one of the faults
    that a test caused. ``first_step_s``: how long the first step of a new process may take, if it compiles. ``exit_code``: the
    expected one.
    """
    run = read_job(run_dir, hosts)
    more = itertools.chain.from_iterable(read_journal(path) for path in journals)
    journal = sorted([*run.journal, *more], key=lambda line: float(line["time"]))
    return judge(journal, commit_times(run), limit_s=limit_s, first_step_s=first_step_s, exit_code=exit_code)


def commit_times(run: Run) -> list[tuple[float, int]]:
    """Return when each step was first committed, and its number, in the order of time."""
    return sorted((min(each.time for each in who.values()), step) for (_, step), who in by_place(run).items())


def judge(
    journal: Sequence[Line],
    commits: Sequence[tuple[float, int]],
    *,
    limit_s: float = LIMIT_S,
    first_step_s: float = 0.0,
    exit_code: int | None = None,
    over: bool = True,
) -> LivenessReport:
    """Find pauses that the journal does not justify; both sequences are in the order of time.

    ``over``: whether the job has ended, so that after its last fault it must have gone on, or ended.
    """
    known = tuple(waits(journal, first_step_s))
    faults = [float(line["time"]) for line in journal if _is_fault(line)]
    between = [_pause(known, faults, *pair) for pair in itertools.pairwise(commits)]
    tail = _tail(journal, commits, known, faults)
    pauses = [*between, *([tail] if tail is not None else [])]
    return LivenessReport(
        longest=max(between, key=lambda pause: pause.length_s, default=None),
        pauses=tuple(pause for pause in pauses if pause.length_s > limit_s),
        violations=(
            *(_unjustified(pause, journal, limit_s) for pause in pauses if pause.unjustified_s > limit_s),
            *(_end(journal, commits, faults, exit_code) if over else ()),
        ),
    )


def _is_fault(line: Line) -> bool:
    return line.get("event") == "FaultInjected" and line.get("fault") not in _EXPLAINED


def _pause(
    known: Sequence[Wait], faults: Sequence[float], before: tuple[float, int | None], after: tuple[float, int | None]
) -> Pause:
    begin, end = before[0], after[0]
    cut = tuple(
        Wait(begin=max(wait.begin, begin), end=min(wait.end, end), why=wait.why)
        for wait in known
        if wait.begin < end and wait.end > begin
    )
    moments = [begin, *(fault for fault in faults if begin < fault < end), end]
    left = (later - earlier - _covered(cut, earlier, later) for earlier, later in itertools.pairwise(moments))
    return Pause(begin=begin, end=end, step=before[1], waits=cut, unjustified_s=max(left, default=0.0))


def _covered(cut: Sequence[Wait], begin: float, end: float) -> float:
    """Return how much of the time from ``begin`` to ``end`` the waits cover."""
    total, reached = 0.0, begin
    for wait in sorted(cut, key=lambda each: each.begin):
        total += max(0.0, min(wait.end, end) - max(wait.begin, reached))
        reached = max(reached, min(wait.end, end))
    return total


def _tail(
    journal: Sequence[Line], commits: Sequence[tuple[float, int]], known: Sequence[Wait], faults: Sequence[float]
) -> Pause | None:
    """Return the time from the last commit to the end of the job; None if there was nothing left to commit."""
    last = commits[-1] if commits else (float(journal[0]["time"]), None)
    stop = next((line for line in journal if name_of(line) == "Stop"), None)
    over = {"LoopEnded", "WorkerFinished", "ScriptEnded"}
    since = [line for line in journal if float(line["time"]) >= last[0]]
    if not commits or any(name_of(line) in over for line in since):
        # Before and after its steps a script may take any time.
        return None
    end = float(stop["time"]) if stop is not None else float(journal[-1]["time"])
    return _pause(known, faults, last, (end, None)) if end > last[0] else None


def _end(
    journal: Sequence[Line], commits: Sequence[tuple[float, int]], faults: Sequence[float], exit_code: int | None
) -> Iterator[str]:
    """Yield a violation if the job did not go on or end after its last fault, or ended with another exit code."""
    stop = next((line for line in reversed(journal) if name_of(line) == "Stop"), None)
    lost = [float(line["time"]) for line in journal if line.get("outcome") == "Fault"]
    last = max([*faults, *lost], default=None)
    if last is not None and stop is None and not any(moment > last for moment, _ in commits):
        yield _shown("after the last fault the job committed nothing, and did not end", journal, last, last)
    if exit_code is not None and (stop is None or stop["exit_code"] != exit_code):
        said = "did not end" if stop is None else f"ended with exit code {stop['exit_code']} ({stop['reason']})"
        moment = float((stop or journal[-1])["time"])
        yield _shown(f"the job {said}; expected exit code {exit_code}", journal, moment, moment)


def _unjustified(pause: Pause, journal: Sequence[Line], limit_s: float) -> str:
    where = "before the first step" if pause.step is None else f"after step {pause.step}"
    what = (
        f"no step was committed for {pause.length_s:.1f} s {where}, {pause.unjustified_s:.1f} s of it (more than {limit_s:g} s)"
        f" for no reason that the journal gives; it says: {pause.reason}"
    )
    return _shown(what, journal, pause.begin, pause.end)


def _shown(what: str, journal: Sequence[Line], begin: float, end: float) -> str:
    """Return a sentence and the lines of the journal around it."""
    around = [line for line in journal if begin - _BEFORE_S <= float(line["time"]) <= end + _BEFORE_S]
    left_out = len(around) - _SHOWN
    lines = [_line(line, begin) for line in around]
    if left_out > 0:
        half = _SHOWN // 2
        lines = [*lines[:half], f"  ... {left_out} more lines", *lines[-half:]]
    return "\n".join([what, f"  at {precise_clock(begin)}, and seconds from there:", *lines])


def _line(line: Line, begin: float) -> str:
    fields: dict[str, Any] = {
        key: value
        for key, value in line.items()
        if key not in ("time", "kind", line["kind"], "stack", "traceback", "name")
        and value not in (None, [], "", False)
    }
    text = " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in fields.items())
    return f"  {float(line['time']) - begin:+8.2f} {name_of(line)} {one_line(text)}"[:_WIDTH]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m craft.testing.liveness",
        description="Look for pauses of a run that its journal does not justify.",
    )
    parser.add_argument("run", type=Path, help="run directory; that of the lighthouse in a job of several hosts")
    parser.add_argument("--host", type=Path, action="append", default=[], help="run directory of a host, once for each")
    parser.add_argument(
        "--journal", type=Path, action="append", default=[], help="a further journal, such as of faults"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds without a commit that need no reason")
    parser.add_argument(
        "--first-step", type=float, default=0.0, help="seconds that a new process's first step may take"
    )
    parser.add_argument("--exit-code", type=int, help="the exit code that the job must have ended with")
    options = parser.parse_args(arguments)
    try:
        report = check(
            options.run,
            options.host,
            options.journal,
            limit_s=options.limit,
            first_step_s=options.first_step,
            exit_code=options.exit_code,
        )
    except ConfigError as error:
        print(indented(error), file=sys.stderr)
        return 2
    for violation in report.violations:
        print(violation)
    if not report.violations:
        print(_summary(report, options.limit))
    return 1 if report.violations else 0


def _summary(report: LivenessReport, limit_s: float) -> str:
    if report.longest is None:
        return "the job was live"
    pause = report.longest
    return (
        f"the job was live: {len(report.pauses)} pauses were longer than {limit_s:g} s, each for a reason;"
        f" the longest took {pause.length_s:.1f} s, after step {pause.step}: {one_line(pause.reason)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
