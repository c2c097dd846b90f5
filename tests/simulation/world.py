"""One simulated job: its hosts, agents, lighthouse, workers, network and disk, on one virtual clock."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from craft.agent.linux.host_access import HostAccess
from craft.agent.linux.scratch import Scratch
from craft.agent.outcome import JobOutcome
from craft.agent.supervisor import Supervisor
from craft.control.lighthouse import LighthouseSettings
from craft.decide.detect.hangs import HangLimits
from craft.decide.job.restoration import RestoreSettings
from craft.decide.techniques import Hang, Loss, Restart, RestoreFromCheckpoint, defaults
from craft.decide.techniques.losses import LossSettings
from craft.decide.techniques.technique import Chosen
from craft.protocol.membership import Generation
from craft.settings.run import RunSettings
from craft.settings.rundir import RunDir
from craft.wire.activity import memory_folder

from .checks import Checks
from .clock import KERNEL, Process
from .disk import DISK_ERRORS, Disk, Killed
from .forks import ForkServer
from .groups import Groups
from .history import History, Violation
from .lighthouse import Client, Keeper, Serving
from .machine import Machine, stand_in
from .network import Network
from .plan import Plan
from .scenario import Event
from .views import Activity, Seen
from .workers import Worker

T = TypeVar("T")
_LIGHTHOUSE_HOST = "lighthouse"
_MOST_LIGHTHOUSES = 6


@dataclass
class Host:
    """One host with an agent."""

    name: str
    workers: int
    agent: Process | None = None
    outcome: JobOutcome | None = None
    runs: int = 0
    """How many agents it has had."""
    supervisor: Supervisor | None = None

    @property
    def is_away(self) -> bool:
        """Whether its agent does not run, and no lighthouse heard that it ended in order."""
        if self.agent is None or self.agent.state == "running":
            return False
        relay = self.supervisor.relay if self.supervisor is not None else None
        return self.outcome is None or relay is None or relay.silent_s() > 0.0

    @property
    def is_starting(self) -> bool:
        """Whether a worker of it is about to come."""
        if self.agent is None or self.agent.state == "dead" or self.supervisor is None:
            return False
        if self.supervisor.relay is None:
            return True
        pool, reports = self.supervisor.pool, self.supervisor.relay.reports()
        waits = any(worker_id not in reports or not reports[worker_id].joined for worker_id in pool.living)
        return waits or bool(pool._starting) or bool(pool._awaited) or bool(pool._queued)


@dataclass
class World:
    """Everything that a seed makes."""

    seed: int
    plan: Plan
    folder: Path
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.machine = Machine(self.seed)
        self.machine.set_exception_handler(self._failed)
        self.network = Network(self.machine)
        self.groups = Groups(self.network)
        self.history = History(self.plan.steps)
        self.workers: dict[str, Worker] = {}
        self.parts: dict[tuple[int, int], str] = {}
        """What was written of checkpoints that are not published."""
        self.serving: Serving | None = None
        self.keeper: Keeper | None = None
        self.violation: str | None = None
        self.strikes: list[tuple[str, str]] = []
        """Each fault that struck, and what the job was doing."""
        self.ordered: set[str] = set()
        """What people asked for."""
        self.lost_hosts: set[str] = set()
        """Hosts that nobody starts again."""
        self.disturbed_at = 0.0
        """When the last fault struck or ended."""
        self._undoing = 0
        self._lighthouses = 0
        self.hosts = {f"h{number}": Host(f"h{number}", count) for number, count in enumerate(self.plan.hosts)}
        own = self.plan.own_lighthouse
        self.lighthouse_host = "h0" if own else _LIGHTHOUSE_HOST
        self.url = f"http://{self.lighthouse_host}:1"
        self.techniques = _techniques(self.plan)
        self.lighthouse_settings = LighthouseSettings(
            workers=sum(self.plan.hosts[: self.plan.first_hosts]),
            min_workers=self.plan.min_workers,
            heartbeat_limit_s=10.0 if own else 1.0,
            kept=True,
            techniques=self.techniques,
        )
        self.lighthouse_dir = RunDir(self.folder / ("h0" if own else _LIGHTHOUSE_HOST)).create()
        self.token_file = self.folder / "token"
        self.disk = Disk(self.lighthouse_dir.path, random.Random(self.seed + 1), self.disturbed)
        self.checks = Checks(self)
        self.machine.programs = {
            "craft.agent.linux.forkserver": lambda words, parent: ForkServer(self, words, parent),
            "lighthouse": self._own_keeper,
        }

    # What happens

    def begin(self) -> None:
        if not self.plan.own_lighthouse:
            self.token_file.write_text("token-of-a-simulated-job")
            self.token_file.chmod(0o600)
            self.start_lighthouse()
        for name in list(self.hosts)[: self.plan.first_hosts]:
            self.start_agent(name)

    def _own_keeper(self, words: Sequence[str], parent: Process) -> Keeper:
        self.keeper = Keeper(self, words, parent, parent.host)
        return self.keeper

    def start_lighthouse(self) -> None:
        """A person, or a system, starts it on a host for it alone."""
        if self.keeper is not None and self.keeper.process.state != "dead":
            return
        self.keeper = Keeper(self, (), None, _LIGHTHOUSE_HOST)
        self.keeper.process.on_exit.append(self._start_lighthouse_again)
        self.keeper.begin(lambda _: None)

    def _start_lighthouse_again(self) -> None:
        """Whoever started it sees that it has ended, and starts it again; not for ever."""
        self._lighthouses += 1
        if self._lighthouses < _MOST_LIGHTHOUSES:
            self.undo_later(self.chance.uniform(0.1, 3.0), self.start_lighthouse)

    def start_agent(self, name: str) -> None:
        """``craft run`` on a host."""
        host = self.hosts[name]
        if host.agent is not None and host.agent.state != "dead":
            return
        host.runs += 1
        host.outcome = None
        host.agent = Process(self.machine, f"agent-{name}", name)
        host.agent.soon(self._supervise, host)

    def _supervise(self, host: Host) -> None:
        agent = host.agent
        assert agent is not None
        run_dir = RunDir(self.folder / host.name).create()
        outside = HostAccess(
            client=lambda *_, **__: Client(self, host.name),  # type: ignore[arg-type]
            session=self.network.session(host.name),
            process_files=lambda pid: Seen(self.machine, pid),  # type: ignore[arg-type, return-value]
            activity=lambda path: Activity(self, path),  # type: ignore[arg-type, return-value]
            scratch=lambda: Scratch(self.folder),
            unreachable=lambda generation, worker_id: self._unreachable(generation, host.name),
        )
        host.supervisor = Supervisor(self._settings(host), run_dir, lambda _: None, outside)
        task = asyncio.ensure_future(host.supervisor.run())

        def ended(task: asyncio.Task[JobOutcome]) -> None:
            host.outcome = task.result()
            self.note(f"{host.name} ends with {host.outcome.exit_code}: {host.outcome.reason}")
            self.checks.agent_ended(host, host.outcome)
            agent.end(host.outcome.exit_code)
            self.machine.enough = self.is_over

        task.add_done_callback(ended)

    def _settings(self, host: Host) -> RunSettings:
        plan = self.plan
        return RunSettings(
            script="train.py",
            workers=host.workers,
            min_workers=plan.min_workers,
            lease_s=plan.lease_s,
            host=host.name,
            lighthouse=None if plan.own_lighthouse else self.url,
            token_file=None if plan.own_lighthouse else self.token_file,
            techniques=self.techniques,
        )

    def _unreachable(self, generation: Generation, host: str) -> tuple[str, ...]:
        return tuple(each.worker_id for each in generation.members if not self.network.carries(host, each.host))

    # Faults

    def pick(self, candidates: Iterable[T]) -> T | None:
        """One of them; None if there is none."""
        found = list(candidates)
        return self.chance.choice(found) if found else None

    def undo_later(self, delay_s: float, undo: Callable[[], None]) -> None:
        """End a fault after a while."""
        self._undoing += 1

        def end() -> None:
            self._undoing -= 1
            self.disturbed()
            undo()

        self.machine.call_later(delay_s, end, context=KERNEL)

    def disturbed(self) -> None:
        self.disturbed_at = self.machine.now

    @property
    def is_quiet(self) -> bool:
        """Whether every fault has ended that ends at all."""
        return self._undoing == 0

    def heal(self) -> None:
        """The network carries again, but to hosts that are no more."""
        self.network.heal()
        for lost in self.lost_hosts:
            for other in (*self.hosts, self.lighthouse_host):
                if other != lost:
                    self.network.cut(lost, other)

    # What is known

    @property
    def is_over(self) -> bool:
        """Whether every agent has ended, or something went wrong."""
        agents = [host for host in self.hosts.values() if host.agent is not None]
        return self.violation is not None or (bool(agents) and all(_has_ended(host) for host in agents))

    @property
    def waits_for_ever(self) -> bool:
        """Whether the job waits for what nobody brings back, as it should: a person has to.

        That is the last copy of its state, and at the very beginning a host that this lighthouse never heard of.
        """
        serving = self.serving
        if not self.is_quiet or serving is None or serving.lighthouse is None:
            return False
        state = serving.lighthouse.loop.state
        if state.generation is None and not state.restoring:
            # Others may come in the place of those that never joined.
            return any(host.agent is None or host.agent.state == "dead" for host in self.hosts.values())
        mute = {each.worker_id for each in self.living if each.process.state == "stopped" or each.training.hangs}
        unlimited = not (state.checkpoint or state.begun_from)
        members = state.generation.members if state.generation is not None else ()
        return any(
            (each.worker_id in mute and unlimited)
            or (each.host in self.lost_hosts and (unlimited or all(member.host == each.host for member in members)))
            for each in state.awaited
        )

    @property
    def living(self) -> list[Worker]:
        """Workers whose processes are there, stopped or not."""
        return [worker for worker in self.workers.values() if worker.process.state != "dead"]

    def note(self, text: str) -> None:
        """Keep a line of the story."""
        self.said.append(f"{self.machine.now:8.3f}  {text}".replace(str(self.folder), "RUN"))

    def violated(self, text: str) -> None:
        if self.violation is None:
            self.violation = text
            self.note(f"VIOLATION: {text}")
            self.machine.enough = True

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody caught: of the simulation, or of production code."""
        error = context.get("exception")
        if error is None or isinstance(error, Killed) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
            # A killed process, or a lighthouse that ends since it cannot make anything durable.
            return
        self.violated(str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}")
        if not isinstance(error, Violation):
            logging.getLogger(__name__).error("uncaught", exc_info=error)


def _has_ended(host: Host) -> bool:
    return host.agent is not None and host.agent.state == "dead"


def _techniques(plan: Plan) -> Chosen:
    hang = HangLimits(limit_s=2.0, factor=20.0, first_step_limit_s=6.0, update_limit_s=4.0)
    return defaults(
        Hang(hang),
        Loss(LossSettings(wait_limit_s=plan.restore_limit_s)),
        RestoreFromCheckpoint(RestoreSettings(tries=plan.restore_tries, limit_s=plan.restore_limit_s)),
        Restart(Restart.Settings(most=plan.max_restarts)),
    )


def run(world: World, events: Sequence[Event]) -> None:
    """Run a job to its end; one that does not come to it is a violation."""
    machine, disk = world.machine, world.disk
    write, fsync = os.write, os.fsync
    with stand_in(machine):
        os.write, os.fsync = disk.write, disk.fsync  # type: ignore[assignment]
        try:
            world.begin()
            for event in events:
                machine.call_later(event.at_s, event.strike, world, context=KERNEL)
            machine.run_for(events[-1].at_s if events else 0.0)
            world.checks.see_out()
        finally:
            machine.wind_up()
            machine.close()
            os.write, os.fsync = write, fsync


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="craft-simulation-", dir=memory_folder()))


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
