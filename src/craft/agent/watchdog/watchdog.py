"""Watch this host's workers: find those that hang or are stopped.

``WorkerPool`` calls ``add`` when a worker was forked and ``remove`` when it ended; ``WatchdogReports`` calls ``look`` every
0.1 s. That reads a page of memory and two small files of ``/proc`` per worker, never blocks, and returns ``Suspect`` values.
``examine`` logs the stacks of one and returns a ``HangReport``. The lighthouse decides which of them blocks the others.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from craft.agent.linux import procfs
from craft.agent.linux.host_access import HostAccess
from craft.agent.linux.procfs import ProcessGlance
from craft.agent.watchdog import stacks
from craft.decide.detect import hangs
from craft.decide.detect.hangs import HangLimits, Overdue
from craft.protocol.values.activity import Doing

logger = logging.getLogger(__name__)

_AWAY_S = 1.0
"""After a longer gap the watchdog itself did not run: that time counts against no worker."""
_BUSY = 0.5
_IDLE = 0.02
_GIL_WORTH_SAYING_S = 1.0


class KernelView(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's view of a worker; CPU times count from the beginning of its phase."""

    state: str
    wchan: str
    elapsed_s: float
    main_cpu_s: float
    other_cpu_s: float
    """CPU time of all its other threads."""
    num_threads: int
    stopped_children: tuple[int, ...] = ()
    """Process ids of its children that a signal stopped, such as a data loader that never answers."""

    @property
    def words(self) -> str:
        """For people: ``asleep in the kernel (hrtimer_nanosleep), no CPU used``."""
        where = f" ({self.wchan})" if self.wchan else ""
        states = {
            "R": "running",
            "S": f"asleep in the kernel{where}",
            "D": f"in a wait of the kernel's that nothing can interrupt{where}: a disk, a network file system, a driver",
            "T": f"stopped by a signal{where}",
        }
        text = f"{states.get(self.state, f'in state {self.state}{where}')}, {self._cpu()}"
        if self.other_cpu_s > max(_IDLE * self.elapsed_s, 0.05):
            text += f"; its other threads used {self.other_cpu_s:.1f} s"
        for child in self.stopped_children:
            text += f"; its child process {child} is stopped by a signal"
        return text

    def _cpu(self) -> str:
        if self.main_cpu_s <= max(_IDLE * self.elapsed_s, 0.02):
            return "no CPU used"
        busy = "busy: " if self.main_cpu_s > _BUSY * self.elapsed_s else ""
        return f"{busy}{self.main_cpu_s:.1f} s of CPU used"


class Regard(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as seen from outside, overdue or not."""

    pid: int
    view: KernelView
    doing: Doing | None
    since_s: float | None
    """How long it has been doing that."""
    gil_kept_s: float | None
    """How long no other Python thread of it has run, if long enough to report."""
    stacks: Path
    """The file to which it writes its stacks on request."""


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is overdue, whether others wait for it or not."""

    worker_id: str
    pid: int
    overdue: Overdue
    seen: float
    """When it was found, on the monotonic clock."""


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of examining a suspect."""

    worker_id: str
    pid: int
    overdue: Overdue
    view: KernelView
    stack: str
    """The stacks of its threads, or the kernel's view if it cannot answer; at most 16 KB."""

    @property
    def sentence(self) -> str:
        """``computing microbatch 3 of step 41 for 12.3 s (limit 10 s); asleep in the kernel (...), no CPU used``."""
        if self.overdue.cause == "stopped":
            return self.overdue.words
        return f"{self.overdue.words}; {self.view.words}{self._gil()}"

    def _gil(self) -> str:
        doing = self.overdue.doing
        if doing is None or doing.beat is None or self.overdue.cause == "gil":
            return ""
        kept_s = doing.since + self.overdue.elapsed_s - doing.beat
        return f"; it keeps the GIL (for {kept_s:.1f} s)" if kept_s > _GIL_WORTH_SAYING_S else ""


class _Watched:
    """One watched worker, with what is remembered from look to look."""

    def __init__(
        self, worker_id: str, pid: int, activity: Path, stacks_path: Path, log: Path, outside: HostAccess
    ) -> None:
        self.worker_id = worker_id
        self.pid = pid
        self.stacks = stacks_path
        self.log = log
        self.process = outside.process_files(pid)
        self.doing: Doing | None = None
        self.began: ProcessGlance | None = None
        """The kernel's view when the phase was first seen."""
        self._reader = outside.activity(activity)
        self._stopped_at: float | None = None
        self._stopped_cpu_s = 0.0
        self._forgiven_s = 0.0

    def look(self, now: float, gap_s: float, limits: HangLimits) -> Overdue | None:
        away_s = max(0.0, gap_s - _AWAY_S)
        glance = self.process.glance()
        if glance is None or glance.state in hangs.DEAD:
            return None
        traced = glance.state == hangs.TRACED
        # A traced or stopped worker cannot make progress, so this time does not count; a stop has a separate limit.
        self._forgiven_s += gap_s if traced or glance.state == hangs.STOPPED else away_s
        new = self._follow(glance)
        if glance.state != hangs.STOPPED:
            self._stopped_at = None
        elif self._stopped_at is None or away_s > 0 or glance.cpu_s > self._stopped_cpu_s:
            # It used CPU, so it was not stopped all the time: a worker that is stopped repeatedly is only slow.
            self._stopped_at, self._stopped_cpu_s = now, glance.cpu_s
        if self._stopped_at is not None:
            return hangs.stopped(glance.state, self._stopped_at, now, self.doing, limits)
        # Judge a phase from its second look on: at the first one the worker may have been writing its page.
        if new or traced or self.doing is None:
            return None
        found = hangs.overdue(self.doing, now, limits)
        # A debugger may be attached while the process runs.
        return found if found is not None and not procfs.is_traced(self.pid) else None

    @property
    def is_stopped(self) -> bool:
        return self._stopped_at is not None

    def _follow(self, glance: ProcessGlance) -> bool:
        """Read the worker's activity page; return whether a new phase began, or none yet."""
        doing = self._reader.read()
        if doing is None:
            return self.doing is None
        new = self.doing is None or doing.changes != self.doing.changes
        if new:
            self.began, self._forgiven_s = glance, 0.0
        self.doing = doing.shifted(self._forgiven_s) if self._forgiven_s else doing
        return new

    def fresh(self) -> Doing | None:
        """Return its current activity; if that cannot be read, the one of the last look."""
        return self._reader.read() or self.doing

    def view(self, elapsed_s: float) -> KernelView:
        glance = self.process.glance()
        began = self.began or glance
        if glance is None or began is None:
            return KernelView(state="X", wchan="", elapsed_s=elapsed_s, main_cpu_s=0, other_cpu_s=0, num_threads=0)
        main = glance.main_cpu_s - began.main_cpu_s
        return KernelView(
            state=glance.state,
            wchan=procfs.wchan(self.pid),
            elapsed_s=elapsed_s,
            main_cpu_s=main,
            other_cpu_s=max(0.0, glance.cpu_s - began.cpu_s - main),
            num_threads=glance.num_threads,
            stopped_children=tuple(
                child for child in procfs.children(self.pid) if procfs.state(child) == hangs.STOPPED
            ),
        )

    def got_on(self, overdue: Overdue) -> bool:
        """Return whether it has made progress since it was found overdue."""
        if overdue.cause == "stopped":
            glance = self.process.glance()
            return glance is not None and glance.state != hangs.STOPPED
        before, now = overdue.doing, self._reader.read()
        if before is None or now is None:
            return False
        if overdue.cause != "gil" or before.beat is None or now.beat is None:
            return now.changes != before.changes
        # Relative to the phase: forgiven time moves both.
        return now.changes != before.changes or now.beat - now.since > before.beat - before.since + 1e-3

    def close(self) -> None:
        self.process.close()
        self._reader.close()


def _suspects(found: Iterable[tuple[_Watched, Overdue | None]], now: float) -> tuple[Suspect, ...]:
    return tuple(
        Suspect(worker_id=each.worker_id, pid=each.pid, overdue=overdue, seen=now)
        for each, overdue in found
        if overdue is not None
    )


async def _no_answer(worker_id: str) -> None:
    """Default of ``ask_worker``: no answer."""


class Watchdog:
    """Watches all workers of this host. Lives on the agent's event loop."""

    def __init__(
        self, limits: HangLimits, clock: Callable[[], float] = time.monotonic, outside: HostAccess | None = None
    ) -> None:
        self._limits = limits
        self._outside = outside or HostAccess()
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self.ask_worker: Callable[[str], Awaitable[str | None]] = _no_answer
        """Asks a worker for its stacks; returns None if it does not answer in time."""
        self._looked: float | None = None
        self._unwatched: dict[str, tuple[int, Path, Path, Path]] = {}

    def add(self, worker_id: str, pid: int, activity: Path, stacks: Path, log: Path) -> None:
        """Watch a worker from now on, unless its process has ended. The files need not exist yet."""
        self.remove(worker_id)
        try:
            self._watched[worker_id] = _Watched(worker_id, pid, activity, stacks, log, self._outside)
        except (FileNotFoundError, ProcessLookupError):
            # ``WorkerEnds`` reports its end.
            return
        except OSError as error:
            logger.warning("%s is not watched for hangs yet: %s. This is tried again", worker_id, error.strerror)
            self._unwatched[worker_id] = (pid, activity, stacks, log)

    def _watch_at_last(self) -> None:
        """Retry workers whose ``/proc`` files could not be opened, as with too many open files."""
        for worker_id, given in list(self._unwatched.items()):
            with contextlib.suppress(OSError):
                self._watched[worker_id] = _Watched(worker_id, *given, self._outside)
                del self._unwatched[worker_id]

    def remove(self, worker_id: str) -> None:
        self._unwatched.pop(worker_id, None)
        watched = self._watched.pop(worker_id, None)
        if watched is not None:
            watched.close()

    def look(self) -> tuple[Suspect, ...]:
        """Return the workers that are overdue now; each is returned at every look while it is."""
        self._watch_at_last()
        now = self._clock()
        gap_s = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        return _suspects(((each, each.look(now, gap_s, self._limits)) for each in self._watched.values()), now)

    def stopped(self) -> frozenset[str]:
        """Return the workers that a signal had stopped at the last look, however briefly."""
        return frozenset(worker_id for worker_id, each in self._watched.items() if each.is_stopped)

    def activities(self) -> dict[str, Doing]:
        """Return what each worker was doing at the last look, if it had published that."""
        return {worker_id: each.doing for worker_id, each in self._watched.items() if each.doing is not None}

    def regard(self, worker_id: str) -> Regard | None:
        """Return what can be seen of a worker without asking it; None if it is not watched."""
        watched = self._watched.get(worker_id)
        if watched is None:
            return None
        now, doing = self._clock(), watched.fresh()
        since_s = now - doing.since if doing is not None else None
        kept_s = now - doing.beat if doing is not None and doing.beat is not None else 0.0
        return Regard(
            pid=watched.pid,
            view=watched.view(since_s or 0.0),
            doing=doing,
            since_s=since_s,
            gil_kept_s=kept_s if kept_s > _GIL_WORTH_SAYING_S else None,
            stacks=watched.stacks,
        )

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(self._watched)

    def waiting_s(self) -> dict[str, float]:
        """Return how long each worker in the exchange has been there."""
        now = self._looked or 0.0
        doing = self.activities()
        return {each: now - doing[each].since for each in doing if doing[each].phase in hangs.WAITING}

    def held_up(self) -> tuple[Suspect, ...]:
        """Return workers that waited in the exchange for longer than ever at the last look: not the cause, but a sign of one."""
        now = self._looked or 0.0
        found = (
            (each, hangs.held_up(each.doing, now, self._limits))
            for each in self._watched.values()
            if each.doing is not None
        )
        return _suspects(found, now)

    async def examine(self, suspect: Suspect) -> HangReport | None:
        """Examine a suspect and log its stacks; return None if it ended or made progress meanwhile.

        Never blocks the event loop. The caller decides whether to end the worker.
        """
        watched = self._watched.get(suspect.worker_id)
        if watched is None or watched.pid != suspect.pid:
            return None
        # First: the signal that asks for the stacks would wake it.
        view = watched.view(suspect.overdue.elapsed_s)
        if view.state in hangs.DEAD:
            return None
        own = await self.ask_worker(suspect.worker_id) if suspect.overdue.cause == "slow" else None
        if own is None:
            stack = await stacks.dump(suspect.pid, watched.stacks)
        else:
            stack = await stacks.with_children(own, suspect.pid, watched.stacks)
        if self._watched.get(suspect.worker_id) is not watched:
            return None
        hang = HangReport(worker_id=suspect.worker_id, pid=suspect.pid, overdue=suspect.overdue, view=view, stack=stack)
        got_on = watched.got_on(suspect.overdue)
        heading = "got on after all, but was" if got_on else "hangs:"
        stacks.append_to_log(watched.log, f"{suspect.worker_id} {heading} {hang.sentence}", stack)
        return None if got_on else hang
