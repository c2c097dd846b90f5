"""A job of two hosts under ``craft chaos`` and faults from outside: starts it, starts ended agents again, ends it.

Enters: a folder, a seed, a length. Leaves: the run directories of all its hosts, what chaos said, a journal of the faults
from outside, a series of resources.
Both hosts are on this machine, by name alone: the network between them is the loopback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.integration.jobs import CRAFT, JOB_VARIABLE, Job, Jobs, Result, describe, end, marked, wait_for

from craft.protocol.errors import Unreachable
from craft.protocol.values import injections
from craft.settings.rundir import RunDir
from craft.telemetry.records.journal import read_lines
from craft.wire.client import Client

from .outside import Outside
from .resources import Resources

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Shape:
    """What a job is made of."""

    script: Path
    hosts: Mapping[str, tuple[int, tuple[str, ...]]]
    """By name, its workers, and other options of its ``craft run``."""
    replica_size: int = 1
    checkpoints: bool = True
    """Without them, not everything is lost at once."""

    @property
    def workers(self) -> int:
        """Of all hosts, without spares."""
        return sum(workers for workers, _ in self.hosts.values())

    @property
    def options(self) -> tuple[str, ...]:
        """What agents and lighthouse have to agree on."""
        return ("--workers-per-replica", str(self.replica_size)) if self.replica_size > 1 else ()


WHOLE = Shape(SCRIPTS / "endless.py", {"a": (2, ("--spares", "1")), "b": (2, ())})
SHARDED = Shape(SCRIPTS / "endless_sharded.py", {"a": (4, ()), "b": (2, ())}, replica_size=2)
"""Three replicas of two workers, of which one host has two."""
# Whoever is drained is not replaced, so that the job would dwindle if that came as often as the rest.
KINDS = ",".join([*(kind for kind in injections.KINDS if kind != "drain"), *injections.KINDS])
CHECKPOINTS_S = 2
OUTSIDE_EVERY = 3.0
"""Faults from outside are so much rarer than those of chaos: the job needs time to be whole in between."""
QUICK = {
    "CRAFT_MAX_RESTARTS": "1000",
    "CRAFT_HANG_LIMIT_S": "3",
    "CRAFT_FIRST_STEP_LIMIT_S": "20",
    "CRAFT_BUCKET_MB": "0.001",
}
_SAMPLE_S = 1.0
_LOOK_S = 0.1
_IDLE_S = 20.0
"""Longer than an agent needs to start others in the place of those that died."""


class Soak:
    """One job, from its start to its end."""

    def __init__(self, folder: Path, shape: Shape = WHOLE) -> None:
        self.folder = folder
        self.shape = shape
        self.run_dir = folder / "lighthouse"
        self.outside = folder / "outside.jsonl"
        self.resources = Resources()
        self.agents: dict[str, Job] = {}
        """The newest agent of each host."""
        self.run_dirs: list[Path] = []
        self._jobs = Jobs(folder)
        self._mark = uuid.uuid4().hex
        self._lighthouse = self._start_lighthouse(port=0)
        self._began = time.monotonic()
        self._sampled = 0.0
        self._idle_since: dict[str, float] = {}
        self._busy_once: set[int] = set()
        """Agents that have had a worker."""
        self._asked: set[int] = set()
        """Agents that were told to end."""

    # Starting and ending.

    def _start(self, command: str, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command}.out").open("ab") as out:
            return subprocess.Popen(
                [*CRAFT, command, "--dir", str(self.run_dir), *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, JOB_VARIABLE: self._mark},
            )

    def _start_lighthouse(self, port: int) -> subprocess.Popen[bytes]:
        options = ("--keep", "--chaos", "--workers", str(self.shape.workers), "--heartbeat-limit", "2")
        return self._start("lighthouse", *options, "--port", str(port), *self.shape.options)

    def restart_lighthouse(self) -> None:
        """SIGKILL to the lighthouse and its keeper, and start both again under the same address."""
        port = urlsplit(self.client.url).port
        assert port is not None
        self._lighthouse.kill()
        self._lighthouse.wait()
        self._lighthouse = self._start_lighthouse(port)

    def end_host(self, host: str) -> None:
        """SIGTERM to the agent of a host; it is started again once it has ended."""
        process = self.agents[host].process
        self._asked.add(process.pid)
        process.terminate()

    def begin(self) -> None:
        """Start both hosts, and wait until the job trains."""
        wait_for(lambda: RunDir(self.run_dir).address.exists(), "the lighthouse listens", 20)
        for host in self.shape.hosts:
            self._start_agent(host)
        wait_for(lambda: self.status()["step"] >= 5, "the job trains", 60)

    def _start_agent(self, host: str) -> None:
        shape = self.shape
        workers, more = shape.hosts[host]
        options = ("--lighthouse", self.client.url, "--token-file", str(RunDir(self.run_dir).token), *shape.options)
        if shape.checkpoints:
            options += ("--checkpoints", str(self.folder / "store"), "--checkpoint-every", f"{CHECKPOINTS_S} s")
        job = self._jobs.start(
            shape.script,
            "--pause-ms",
            "10",
            workers=workers,
            options=(*options, *more),
            environment={**QUICK, "CRAFT_HOST": host},
        )
        self.agents[host] = job
        self.run_dirs.append(job.run_dir)

    @property
    def client(self) -> Client:
        return Client.of_run(RunDir(self.run_dir))

    def status(self) -> dict[str, Any]:
        """The job's status; the lighthouse may be away for a moment."""

        def ask() -> dict[str, Any] | None:
            try:
                return self.client.get_status()
            except Unreachable:
                return None

        return wait_for(ask, "the lighthouse answers", 30)

    def torment(self, seed: int, length_s: float, every_s: float) -> str:
        """Let chaos loose for so long, with so much time between two faults on average; returns what it said.

        Agents that it kills are started again. Faults from outside come meanwhile.
        """
        outside = Outside(self, self.outside, seed, OUTSIDE_EVERY * every_s)
        began = time.monotonic()
        chaos = self._start(
            "chaos", "--seed", str(seed), "--every", f"{every_s:g}s", "--kinds", KINDS, "--for", f"{length_s:g}s"
        )
        while chaos.poll() is None:
            self._revive()
            status = self._look()
            if status is not None:
                outside.look(status, time.monotonic() - began)
            time.sleep(_LOOK_S)
        said = (self.folder / "chaos.out").read_text()
        assert chaos.returncode == 0, said + self.tell()
        return said

    def _revive(self) -> None:
        for host, job in self.agents.items():
            code = job.process.poll()
            if code is None:
                continue
            killed = code == -signal.SIGKILL or job.process.pid in self._asked
            assert killed, f"the agent of {host} ended by itself with {code}{self.tell()}"
            wait_for(lambda job=job: not job.processes(), "its workers end with it", 10)  # type: ignore[misc]
            self._idle_since.pop(host, None)
            self._start_agent(host)

    def _end_idle(self, workers: list[dict[str, Any]], now: float) -> None:
        """A host whose workers were all drained is ended and started again, as who drained it would do."""
        busy = {worker["host"] for worker in workers if worker["state"] in ("starting", "waiting", "member")}
        for host, job in self.agents.items():
            if host in busy:
                self._busy_once.add(job.process.pid)
            if host in busy or job.process.pid not in self._busy_once:
                # One that has had no worker yet is starting, which takes long on a busy machine.
                self._idle_since.pop(host, None)
            elif now - self._idle_since.setdefault(host, now) > _IDLE_S and job.process.poll() is None:
                self.end_host(host)

    def _look(self) -> dict[str, Any] | None:
        """Look at the job once a second; returns its status, None if it is not the time or no lighthouse answers."""
        now = time.monotonic() - self._began
        if now - self._sampled < _SAMPLE_S:
            return None
        self._sampled = now
        self.resources.sample("keeper", [self._lighthouse.pid], now)
        try:
            status = self.client.get_status()
        except Unreachable:
            return None
        workers = status["workers"]
        self._end_idle(workers, now)
        for host, job in self.agents.items():
            crew = [
                worker
                for worker in workers
                if worker["host"] == host and worker["state"] in ("starting", "waiting", "member")
            ]
            self.resources.sample("agent", [job.process.pid], now, peers=len(crew))
        if status["settled"]:
            # Else a generation is being opened, for which a worker has more of everything for a while.
            pids = [worker["pid"] for worker in workers if worker["state"] == "member" and worker["pid"]]
            self.resources.sample("worker", pids, now, peers=len(pids))
        return status

    def recover(self, limit_s: float = 60.0) -> None:
        """Wait until the job is whole again and gets on."""

        def whole() -> bool:
            self._revive()
            status = self.status()
            members = [worker for worker in status["workers"] if worker["state"] == "member"]
            everybody = sum(agent["connected"] for agent in status["agents"]) == len(self.shape.hosts)
            leaving = any(job.process.pid in self._asked for job in self.agents.values())
            complete = everybody and not leaving and len(members) >= 2
            return bool(status["settled"] and complete and status["upcoming"] is None)

        def gets_on(reached: int) -> bool:
            self._revive()
            return bool(self.status()["step"] > reached + 20)

        self._wait(whole, "the job is whole again", limit_s)
        reached = self.status()["step"]
        self._wait(lambda: gets_on(reached), "the job gets on", limit_s)
        # What was injected last may have come only now.
        self._wait(whole, "the job is whole again", limit_s)

    def stop(self, limit_s: float = 60.0) -> dict[str, Result]:
        """Stop the job as a person would, and wait for the end of every process; returns how each host ended."""
        self.client.stop("enough")
        self._wait(lambda: all(job.process.poll() is not None for job in self.agents.values()), "all end", limit_s)
        results = {host: job.wait(20) for host, job in self.agents.items()}
        self._lighthouse.terminate()
        assert self._lighthouse.wait(10) == 0, self.tell()
        wait_for(lambda: not marked(JOB_VARIABLE, self._mark), "nothing of the lighthouse is left", 10)
        return results

    def _wait(self, condition: Any, what: str, limit_s: float) -> None:
        try:
            wait_for(condition, what, limit_s)
        except AssertionError as error:
            self._dump_stacks()
            raise AssertionError(f"{error}{self.tell()}") from None

    def _dump_stacks(self) -> None:
        """Have every worker write its stacks into its log."""
        for worker in self.status()["workers"]:
            if worker["state"] in ("member", "waiting", "starting") and worker["pid"]:
                try:
                    os.kill(worker["pid"], signal.SIGUSR1)
                except ProcessLookupError:
                    continue
        time.sleep(1.0)

    def close(self) -> None:
        """End whatever is left."""
        self.resources.write(self.folder / "resources.json")
        self._jobs.end()
        if self._lighthouse.poll() is None:
            self._lighthouse.kill()
        self._lighthouse.wait()
        end(marked(JOB_VARIABLE, self._mark))

    # Looking back.

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(RunDir(self.run_dir).journal) if line.get("event") == name]

    def tell(self) -> str:
        """All that a failed test needs to show."""
        parts = [f"\nfiles: {self.folder}"]
        parts += [f"--- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(self.folder.glob("*.out"))]
        parts += [f"=== host {host}{describe(_so_far(job))}" for host, job in self.agents.items()]
        return "\n".join(parts)


def _so_far(job: Job) -> Result:
    return Result(
        exit_code=-1 if job.process.poll() is None else job.process.returncode,
        output=job.files.with_suffix(".out").read_text(errors="replace"),
        errors=job.files.with_suffix(".err").read_text(errors="replace"),
        run_dir=job.run_dir,
        wall_s=time.monotonic() - job.started,
    )
