"""Assemble a lighthouse: loop, journal, dispatch and heartbeats, on asyncio's clock."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from craft.control.agents.dispatch import Dispatch
from craft.control.agents.hang_bundle import HangBundles
from craft.control.agents.heartbeat import DEFAULT_LIMIT_S, RETURN_LIMITS, Heartbeats
from craft.control.agents.sessions import Sessions
from craft.control.core.loop import GRACE_S, Loop
from craft.control.core.persistence import Durable, restore
from craft.control.core.persistence_file import DurableFile
from craft.control.core.policy_guard import guarded
from craft.control.replay.event_stream import EventStream
from craft.control.replay.journal_replay import JournalReplay
from craft.control.replay.status import AgentStatus, LighthouseStatus, Status, status_of
from craft.control.replay.timings import Timings
from craft.decide.job.alerts import AlertSettings
from craft.decide.job.state import JobState
from craft.decide.techniques import Alerts, Loss, defaults
from craft.decide.techniques.technique import Chosen
from craft.protocol.errors import ConfigError
from craft.protocol.journal import FileDamaged, LighthouseAlone, LighthouseHeard, LighthouseStarted
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import Journal, read_lines
from craft.telemetry.records.journal_reader import damaged_file, quarantine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LighthouseSettings:
    """The settings of a lighthouse."""

    workers: int
    """Slots of the job: the first generation waits for this many."""
    min_workers: int = 1
    replica_size: int = 1
    """Workers that hold one copy of the model together."""
    heartbeat_limit_s: float = DEFAULT_LIMIT_S
    """A host whose agent is silent for longer is lost."""
    grace_s: float = GRACE_S
    """How long to wait after a generation breaks, before its members re-form the group."""
    chaos: bool = False
    """Whether the job was started for fault injection."""
    kept: bool = False
    """Whether a keeper restarts this lighthouse when it is killed."""
    techniques: Chosen = field(default_factory=defaults)

    @property
    def alerts(self) -> AlertSettings:
        """Rules and hooks of craft.toml; without the technique, alerts are only journaled."""
        found = self.techniques.get(Alerts)
        return found.settings if found is not None else AlertSettings()

    @property
    def chooses_by_cost(self) -> bool:
        """Whether times are measured, to choose the answer to a loss."""
        found = self.techniques.get(Loss)
        return found is not None and found.settings.answer == "auto"


class AsyncioHost:
    """Time, timers and random numbers of a real process."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._loop = asyncio.get_running_loop()
        self.tell = dispatch.tell

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return self._loop.time()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._loop.call_later(delay_s, call)

    def nonce(self) -> str:
        return secrets.token_hex(4)


class FailStop:
    """A store whose failure ends the lighthouse: it must not publish what is not durable."""

    def __init__(self, inner: DurableFile, broken: asyncio.Future[str]) -> None:
        self._inner = inner
        self._broken = broken

    def save(self, durable: Durable) -> None:
        try:
            self._inner.save(durable)
        except OSError as error:
            if not self._broken.done():
                self._broken.set_result(f"cannot make a generation durable: {error}")
            raise


class Lighthouse:
    """One job's lighthouse. All calls come from the thread of its asyncio loop."""

    def __init__(self, run: RunDir, settings: LighthouseSettings, url: str) -> None:
        durable_file = DurableFile(run.generation)
        durable = durable_file.load()
        damaged_lines = quarantine(run.journal)
        fresh = JobState(slots=settings.workers, min_workers=settings.min_workers, replica_size=settings.replica_size)
        replay = JournalReplay(read_lines(run.journal))
        self.checkpoints, self.alerts = replay.checkpoints, replay.alerts
        _check_replica_size(run, settings, durable)
        state = restore(fresh, durable)
        if durable is None or durable.checkpoint is msgspec.UNSET:
            # Files of earlier versions lack the checkpoints.
            state = self.checkpoints.added_to(state)
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Gets a sentence if the lighthouse cannot go on."""
        self.url = url
        self.settings = settings
        self.journal = Journal(run.journal, time.time)
        self.lines: Counter[tuple[str, str]] = Counter()
        """How often each (kind, name) was journaled by this lighthouse."""
        self.journal.listen(lambda line: self.lines.update([(line["kind"], str(line.get(line["kind"], "")))]))
        self.journal.listen(self.checkpoints)
        self.event_stream = EventStream(self.journal, run.journal)
        # Microseconds, so that a restart never reuses a number.
        self.dispatch = Dispatch(first_sequence=int(time.time() * 1e6))
        host = AsyncioHost(self.dispatch)
        self.loop = Loop(
            state,
            policies=guarded(settings.techniques, self.journal),
            store=FailStop(durable_file, self.broken),
            journal=self.journal,
            host=host,
            grace_s=settings.grace_s,
            faults=replay.faults,
            journaled=replay.journaled,
            timings=Timings(replay.times) if settings.chooses_by_cost else None,
        )
        self.heartbeats = Heartbeats(settings.heartbeat_limit_s, host, self)
        self.sessions = Sessions(self.loop, self.dispatch, self.heartbeats)
        self.journal.listen(HangBundles(run, self.sessions.inspections, self.host_of, lambda: self.sessions.by_host))
        self._begin(state, again=durable is not None)
        self._tell_damage(run, durable_file.problem, damaged_lines)

    def _begin(self, state: JobState, again: bool) -> None:
        number = state.generation.number if state.generation is not None else 0
        started = LighthouseStarted(
            pid=os.getpid(), url=self.url, generation=number, restarted=again, slots=state.slots
        )
        self.journal.write("event", started)
        for host in sorted({view.member.host for view in state.having("waiting", "member")}):
            self.heartbeats.expect(host, RETURN_LIMITS * self.heartbeats.limit_s)
        if again:
            self.dispatch.tell(state)

    def _tell_damage(self, run: RunDir, problem: str, damaged_lines: int) -> None:
        """Journal, and so print, what of the run directory was damaged."""
        if problem:
            self.journal.write("event", FileDamaged(file=run.generation.name, detail=problem))
        if damaged_lines:
            lines = "1 line is" if damaged_lines == 1 else f"{damaged_lines} lines are"
            detail = f"{lines} not readable, and set aside in {damaged_file(run.journal).name}"
            logger.warning("%s: %s", run.journal, detail)
            self.journal.write("event", FileDamaged(file=run.journal.name, detail=detail))

    def host_of(self, worker_id: str) -> str | None:
        """Return the host of any known worker."""
        seen, view = self.loop.report_events.seen.get(worker_id), self.loop.state.view(worker_id)
        if seen is not None:
            return seen.host
        return view.member.host if view is not None else None

    def status(self) -> Status:
        """Return the status of the job."""
        agents = [
            AgentStatus(
                host=session.host,
                pid=session.pid,
                connected=not session.closed,
                silent_s=round(self.heartbeats.silent_s(session.host) or 0.0, 3),
            )
            for session in self.sessions.by_host.values()
        ]
        own = LighthouseStatus(pid=os.getpid(), url=self.url)
        return status_of(
            self.loop.state,
            self.loop.reports,
            self.loop.faults,
            agents,
            own,
            replace(self.checkpoints.status, taken=self.loop.report_events.checkpoints),
            chaos=self.settings.chaos,
            worker_ids=self.loop.worker_ids,
        )

    async def disconnect(self) -> None:
        """Close all connections; the journal stays open for what is still being handled."""
        self.event_stream.close()
        await self.sessions.close()

    def on_silent(self, host: str, silent_s: float) -> None:
        """Handle a host that was not heard for the limit while others were."""
        session = self.sessions.by_host.get(host)
        if session is not None and session.closed:
            reason = f"the connection of its agent closed and did not come back within {self.heartbeats.limit_s:g} s"
        else:
            reason = f"no sign of life of its agent for {silent_s:.2g} s"
        self.loop.suspect_host(host, reason)

    def on_alone(self, silent_s: float) -> None:
        """Journal that no host is heard, and wait."""
        if self.loop.state.stopping is None:
            self.journal.write("event", LighthouseAlone(pid=os.getpid(), silent_s=round(silent_s, 3)))

    def on_heard(self, host: str, alone_s: float) -> None:
        """Journal that a host is heard again; the others get time to follow."""
        if self.loop.state.stopping is None:
            self.journal.write("event", LighthouseHeard(host=host, alone_s=round(alone_s, 3)))


def _check_replica_size(run: RunDir, settings: LighthouseSettings, durable: Durable | None) -> None:
    """Refuse to go on with a job whose replicas have another size."""
    last = (durable.generation or durable.former) if durable is not None else None
    if last is None:
        return
    size = 1 if last.replica_size is msgspec.UNSET else last.replica_size
    if size != settings.replica_size:
        raise ConfigError(
            f"the job in {run.path} has {size} workers per replica, not {settings.replica_size}: give"
            f" --workers-per-replica {size}"
        )
