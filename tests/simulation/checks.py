"""Promises that are checked while a job runs, and at its end. The history of its commits is checked in ``history``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from craft.agent.outcome import JobOutcome
from craft.control.lighthouse import Lighthouse
from craft.decide.policies.policy import EXIT_BUG, EXIT_FINISHED, EXIT_GIVEN_UP, EXIT_PREEMPTED
from craft.protocol.errors import ConfigError

from .coverage import job_state

if TYPE_CHECKING:
    from .world import Host, World

END_LIMIT_S = 100.0
"""So long after the last fault a job has ended: it waits 60 s for the last copy, and 25 s for others."""
_MOST_MEETINGS = 12
"""So many generations in a row without a commit are more than what is tried before somebody is replaced or the job ends."""
_SUSPICIONS = ("watch", "peers", "heartbeat")
_TERMINATED = 143
_BY_ITSELF = 1.0
"""A wait for others is judged by what was there at so much of it."""


class Checks:
    """Sees every line that a lighthouse of the job writes, after what it says was decided."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._told: dict[int, str] = {}
        """Generations that were given out, by number, with their names."""
        self._stop: dict[str, Any] | None = None
        self._restorations = 0
        self._meetings: list[int] = []
        """For each generation since the last commit: how many commits there had been."""
        self._came_at = 0.0
        """When a worker last joined or ended."""
        self._await_expired = -1.0

    def begin(self, lighthouse: Lighthouse) -> None:
        """A lighthouse has started: it must have forgotten nothing that anybody was told."""
        state = lighthouse.loop.state
        highest = max(self._told, default=0)
        if state.highest < highest:
            self._world.violated(f"a lighthouse begins with generation {state.highest}, and {highest} was given out")
        if state.stopping is not None and self._stop is None:
            # The one before was killed between the file and the journal.
            self._stop = {"exit_code": state.stopping.exit_code}
        if self._stop is not None and state.stopping is None:
            self._world.violated("a lighthouse begins a job again that was over")
        number = state.restoration.number if state.restoration is not None else 0
        if number < self._restorations:
            self._world.violated(f"a lighthouse begins with restoration {number}, and {self._restorations} was told")
        lighthouse.journal.listen(lambda line: self._see(lighthouse, line))

    def did_not_start(self, error: Exception) -> None:
        """Damage of one file keeps no lighthouse from starting; of both copies of one record it may."""
        copies = {"generation.json", ".generation.json.spare"} & self._world.disk.damaged
        torn = {kind for kind, _ in self._world.strikes} & {
            "cut power",
            "kill while writing",
            "disk full",
            "syncs fail",
        }
        if isinstance(error, ConfigError) and (len(copies) > 1 or (copies and torn)):
            self._world.note(f"the lighthouse does not start: {error}")
            return
        self._world.violated(f"the lighthouse does not start: {type(error).__name__}: {error}")

    def agent_ended(self, host: Host, outcome: JobOutcome) -> None:
        """An agent ends as the job did, or as somebody told it to."""
        code = outcome.exit_code
        told = "terminate" in self._world.ordered and code in (EXIT_PREEMPTED, _TERMINATED)
        as_the_job = self._stop is not None and code == self._stop["exit_code"]
        never_began = (
            host.supervisor is not None and host.supervisor.relay is not None and not host.supervisor.pool.started
        )
        if never_began and "fork server ended" in outcome.reason:
            return
        if not told and not as_the_job and not self._is_without_lighthouse(code):
            self._world.violated(f"the agent of {host.name} ends with {code}, and the job does not: {outcome.reason}")

    def _is_without_lighthouse(self, code: int) -> bool:
        """Whether an agent gave up since its lighthouse cannot be started, or does not answer when it comes."""
        torn = {kind for kind, _ in self._world.strikes} & {"cut power", "flip bit", "disk full", "syncs fail"}
        return code == EXIT_GIVEN_UP and bool(torn)

    def _see(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        name = line.get("event") or line.get("action") or line.get("outcome")
        self._world.note(_in_words(line))
        see: Callable[[Lighthouse, dict[str, Any]], None] | None = getattr(self, f"_see_{name}", None)
        if see is not None:
            see(lighthouse, line)

    # Generations

    def _see_Reconfigure(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._made(line)
        commits = self._world.history.commits
        self._meetings = [each for each in self._meetings if each == commits] + [commits]
        if len(self._meetings) > _MOST_MEETINGS:
            self._world.violated(f"{len(self._meetings)} generations in a row, and none committed a step")

    def _see_Propose(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._made(line)

    def _made(self, line: dict[str, Any]) -> None:
        number = line["generation"]
        if number <= max(self._told, default=0):
            self._world.violated(f"generation {number} is given out twice, now as {line['name']}")
        self._told[number] = line["name"]

    def _see_Restore(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._restorations += 1

    # Losses

    def _see_AwaitExpired(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._await_expired = self._world.machine.now

    def _see_WorkerLost(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._came_at = self._world.machine.now
        if line["source"] in _SUSPICIONS:
            self._suspected(lighthouse, [line["worker_id"]])

    def _see_HostLost(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._came_at = self._world.machine.now
        self._suspected(lighthouse, [each.worker_id for each in self._world.living if each.host == line["host"]])

    def _suspected(self, lighthouse: Lighthouse, suspects: list[str]) -> None:
        """The last copy of the state is never given up on suspicion: some other member that has it is not known to be lost."""
        state, workers = lighthouse.loop.state, self._world.workers
        given_up = [workers[each] for each in suspects if each in workers]
        had = [each.worker_id for each in given_up if each.process.state != "dead" and _has_state(each)]
        left = [each for each in state.members if each in workers and _has_state(workers[each])]
        done = state.having("finished") or state.ending or self._await_expired == self._world.machine.now
        hangs = any(each.training.hangs for each in given_up)
        if had and not left and not done and not hangs:
            self._world.violated(
                f"{', '.join(had)} has the only copy of the training state, and is given up on suspicion"
            )

    def _see_WorkerJoined(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._came_at = self._world.machine.now

    # Waits

    def _see_HoldExpired(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        """Nobody is waited for who can never come."""
        world = self._world
        limit_s = world.plan.restore_limit_s
        since = max(self._came_at, world.disturbed_at)
        away = [host for host in world.hosts.values() if host.agent is not None and host.is_away]
        coming = any(host.is_starting for host in world.hosts.values())
        if not away and not coming and world.machine.now - since >= limit_s - _BY_ITSELF:
            world.violated(f"the job waited {limit_s:g} s for workers, and none could come any more")

    # The end

    def _see_Stop(self, lighthouse: Lighthouse, line: dict[str, Any]) -> None:
        self._stop = line
        code, reason = line["exit_code"], line["reason"]
        world, ordered = self._world, self._world.ordered
        kinds = {kind for kind, _ in world.strikes}
        if code == EXIT_FINISHED:
            if world.history.furthest < world.plan.steps and not ordered & {"stop", "terminate"}:
                world.violated(f"the job is over as finished after {world.history.furthest} steps: {reason}")
        elif code == EXIT_PREEMPTED:
            if not ordered & {"preempt", "terminate", "drain"}:
                world.violated(f"the job makes room, and nobody asked for it: {reason}")
        elif code == EXIT_GIVEN_UP:
            self._given_up(lighthouse, reason, kinds)
        elif code != EXIT_BUG or not kinds & {"raise in worker", "exit 0 early"}:
            world.violated(f"the job ends with {code}: {reason}")

    def _given_up(self, lighthouse: Lighthouse, reason: str, kinds: set[str]) -> None:
        state, world = lighthouse.loop.state, self._world
        trains = [
            worker_id
            for worker_id in state.members
            if worker_id in world.workers
            and world.workers[worker_id].process.state == "running"
            and _has_state(world.workers[worker_id])
        ]
        in_vain = "again" in reason and kinds & {"break exchange often", "cut between hosts", "isolate host"}
        few = "--min-workers" in reason or "before the end of the script" in reason
        if trains and not in_vain and not few:
            world.violated(f"the job is given up, and {', '.join(trains)} could go on: {reason}")

    def see_out(self) -> None:
        """Nothing else goes wrong: the job comes to its end."""
        world, machine = self._world, self._world.machine
        while not world.is_quiet and not machine.enough:
            machine.run_for(1.0)
        quiet_at = machine.now
        while not machine.enough and machine.now < max(world.disturbed_at, quiet_at) + END_LIMIT_S:
            if world.waits_for_ever:
                world.note("the job waits for the last copy of its state, which is there and does not answer")
                return
            machine.run_for(1.0)
        if not world.is_over:
            world.violated(f"the job has not ended {END_LIMIT_S:g} s after the last fault: it {job_state(world)}")


def _has_state(worker: Any) -> bool:
    return bool(worker.is_inside and worker.training.ledger.has_state)


def _in_words(line: dict[str, Any]) -> str:
    left_out = ("time", "kind", "event", "action", "outcome", "seen", "member", "pid", "progress", "traceback", "stack")
    name = line.get("event") or line.get("action") or line.get("outcome")
    member = line.get("member")
    fields = ({"worker_id": member["worker_id"]} if member else {}) | {
        key: value for key, value in line.items() if key not in left_out and value not in (None, "", (), False)
    }
    return f"{line['kind']} {name} " + " ".join(f"{key}={value}" for key, value in fields.items())
