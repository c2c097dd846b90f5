"""What each built-in technique needs to show itself in a job: options, a fault that it answers, and how one sees that it did."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from craft.settings.rundir import RunDir
from craft.wire.auth import bearer, read_token

from .jobs import Job, wait_for

Line = dict[str, Any]


class Play:
    """One job in which techniques show themselves, one after the other."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self._used: set[str] = set()
        self.lost: set[str] = set()
        """Workers that count as lost by now."""
        self.began_again = False
        """Then whoever was just joining, without any state, counts as lost, too."""

    def lines(self, kind: str, **fields: object) -> list[Line]:
        return [
            line
            for line in self.job.journal()
            if kind in (line.get("event"), line.get("action"))
            and all(line.get(key) == value for key, value in fields.items())
        ]

    def see(self, kind: str, what: str, **fields: object) -> Line:
        """Wait for a line of the journal."""
        return wait_for(lambda: self.lines(kind, **fields), what)[-1]

    def settled(self) -> list[str]:
        """Wait until all is calm, and every slot is taken that can be; returns the members by rank."""

        def calm() -> list[str]:
            status = self.job.client.get_status()
            found = [each for each in status["workers"] if each["state"] == "member" and each["rank"] is not None]
            return (
                [each["worker_id"] for each in sorted(found, key=lambda each: each["rank"])]
                if status["settled"]
                else []
            )

        return wait_for(calm, "the generation is settled")

    def victim(self) -> str:
        """A member that has committed steps, and was not the victim of anything before."""

        def found() -> str | None:
            committing = self.job.committing()
            fresh = [each for each in self.settled() if each in committing and each not in self._used]
            return fresh[-1] if fresh else None

        chosen = wait_for(found, "a member that nothing has happened to")
        self._used.add(chosen)
        return chosen

    def goes_on(self) -> None:
        """Wait for a few more steps."""
        self.job.reach_step(self.job.steps() + 3)


@dataclass(frozen=True)
class Part:
    """A technique's part in a pair."""

    show: Callable[[Play], None]
    """Brings about what it answers, and waits until it has."""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    """Others that it stands on."""
    last: bool = False
    """It ends the job."""


def _loss(play: Play) -> None:
    victim = play.victim()
    play.lost.add(victim)
    play.job.kill(victim)
    play.see("WorkerLost", "the loss is seen", worker_id=victim)
    play.goes_on()


def _restart(play: Play) -> None:
    before = len(play.job.committing())
    _loss(play)
    wait_for(lambda: len(play.job.committing()) > before, "whoever takes its place commits")


def _spares(play: Play) -> None:
    wait_for(
        lambda: [each for each in play.job.client.get_status()["workers"] if each["state"] == "waiting"],
        "a spare waits",
    )
    _restart(play)


def _hang(play: Play) -> None:
    victim = play.victim()
    play.lost.add(victim)
    play.job.client.inject("stop", sure=True, worker_id=victim)
    play.see("WorkerLost", "the stopped worker is given up", worker_id=victim, source="watch")
    play.goes_on()


def _retry(play: Play) -> None:
    before = len(play.lines("Reconfigure", again=True))
    play.job.client.inject("cut", sure=True, worker_id=play.settled()[-1])
    wait_for(lambda: len(play.lines("Reconfigure", again=True)) > before, "the same members meet again")
    play.goes_on()


def _catch_up(play: Play) -> None:
    victim = play.victim()
    play.job.client.drain(worker_id=victim, reason="a test")
    play.see("WorkerLeft", "the drained worker leaves", worker_id=victim)
    play.goes_on()


def _divergence(play: Play) -> None:
    play.see("NumbersDiverged", "the number that is none is found")


def _checkpoints(play: Play) -> None:
    play.job.client.checkpoint("a test", tag="asked-for")
    play.see("CheckpointWritten", "the checkpoint is complete", tag="asked-for")


def _restore(play: Play) -> None:
    _checkpoints(play)
    everybody = play.settled()
    play.lost.update(everybody)
    play.job.kill(*everybody)
    play.see("Restore", "the job begins again from its checkpoint")
    play.began_again = True
    play.goes_on()


def _stragglers(play: Play) -> None:
    slow = play.victim()
    play.job.client.inject("slow", sure=True, worker_id=slow, seconds=20.0, delay_ms=80.0)
    play.see("StragglerFound", "the slow worker is found", worker_id=slow)
    play.goes_on()


def _alerts(play: Play) -> None:
    victim = play.victim()
    labels = {"alertname": "Hot", "worker_id": victim, "craft_answer": "drain"}
    one = {"status": "firing", "labels": labels, "startsAt": "2026-01-01T00:00:00Z", "fingerprint": victim}
    run = RunDir(play.job.run_dir)
    place = urlsplit(run.read_address())
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    body = json.dumps({"version": "4", "groupKey": "g", "alerts": [one]})
    connection.request(
        "POST", "/v1/alerts", body, {**bearer(read_token(run.token)), "Content-Type": "application/json"}
    )
    assert connection.getresponse().status == 200
    connection.close()
    play.see("WorkerLeft", "the worker of the alert leaves", worker_id=victim)
    play.goes_on()


def _preemption(play: Play) -> None:
    play.job.client.preempt("a test", deadline_s=60.0)


PARTS: dict[str, Part] = {
    "loss": Part(_loss),
    "restart": Part(_restart),
    "spares": Part(_spares, options=("--spares", "2")),
    "hang": Part(_hang),
    "retry": Part(_retry),
    "joining": Part(_catch_up),
    "divergence": Part(_divergence, options=("--on-divergence", "skip"), arguments=("--nan-at", "7")),
    "checkpoints": Part(_checkpoints, options=("--checkpoints", "store")),
    "stragglers": Part(_stragglers),
    "alerts": Part(_alerts),
    "restore": Part(_restore, options=("--checkpoints", "store"), needs=frozenset({"checkpoints", "restart"})),
    "preemption": Part(_preemption, options=("--checkpoints", "store"), needs=frozenset({"checkpoints"}), last=True),
}
