"""Measures how fast an alert frees a job that hangs: 4 workers wait in an exchange for one that sleeps in its microbatch.

Nobody has crashed and no limit has run out: only the alert tells. From Alertmanager's POST until the main thread of the last
of the 4 is out of the exchange, by what each of them writes down; and until all of them act under the new generation, by the
lighthouse's journal. Example, a quick try:

    python bench/alerts.py --trials 3
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.conduct import conduct
from bench.jobs import BENCH, CraftJob, JobFailed
from bench.recovery import wait_until

WORKERS = 5
MICROBATCHES = 10
LIMIT_S = 90.0
BLOCKED_S = 0.5
"""After so long without a commit, everybody else has come to the exchange."""


def alert(name: str, worker_id: str) -> bytes:
    """A body as Alertmanager sends it; the label says what is to be done."""
    labels = {"alertname": "Asleep", "worker_id": worker_id, "craft_answer": "fail"}
    one = {"status": "firing", "labels": labels, "startsAt": "2026-01-01T00:00:00Z", "fingerprint": name}
    return json.dumps({"version": "4", "groupKey": "bench", "alerts": [one]}).encode()


def post(job: CraftJob, body: bytes) -> tuple[float, float]:
    """Send it over a new connection, as Alertmanager does; returns when it was sent, and how long the answer took."""
    place = urlsplit(job.address)
    headers = {"Authorization": f"Bearer {job.token}", "Content-Type": "application/json"}
    sent = time.time()
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    connection.request("POST", "/v1/alerts", body, headers)
    response = connection.getresponse()
    answered = json.loads(response.read())
    took = time.time() - sent
    connection.close()
    if response.status != 200 or not answered["outcomes"][0]["actions"]:
        raise JobFailed(f"the alert was answered with {response.status}: {answered}")
    return sent, took


def measure(job: CraftJob, beds: Path, number: int) -> dict[str, float]:
    """One trial: wait until all are there, put one to sleep, let the others block, send the alert."""

    def whole() -> bool:
        if len(job.commits()) < WORKERS:
            return False
        status = job.status()
        return bool(status["settled"]) and sum(w["state"] == "member" for w in status["workers"]) == WORKERS

    wait_until(job, whole, "all slots filled", LIMIT_S)
    time.sleep(1.0)
    members = [member.name for member in job.members()]
    sleeper = members[number % WORKERS]
    (beds / sleeper).touch()
    wait_until(job, (beds / f"{sleeper}.asleep").exists, "the worker sleeps", LIMIT_S)
    time.sleep(BLOCKED_S)
    last = max(commits[-1].time_s for commits in job.commits().values() if commits)
    sent, answered_s = post(job, alert(f"trial{number}", sleeper))
    if sent - last < BLOCKED_S / 2:
        raise JobFailed("a step was committed though one worker sleeps")
    survivors = set(members) - {sleeper}

    def entered() -> dict[str, float]:
        made = [line for line in job.journal() if line.get("action") == "Reconfigure" and line["time"] >= sent]
        return {
            line["worker_id"]: line["time"]
            for line in job.journal()
            if line.get("event") == "GenerationEntered" and made and line["generation"] == made[0]["generation"]
        }

    # Nothing is read meanwhile: that would take processor time from those who are measured.
    time.sleep(0.5)
    wait_until(job, lambda: survivors <= entered().keys(), "the others are freed", LIMIT_S)
    acting = [moment - sent for name, moment in entered().items() if name in survivors]
    free = [moment - sent for moment in freed(job, survivors, sent)]
    return {"freed_s": max(free), "first_s": min(free), "acting_s": max(acting), "answered_s": answered_s}


def freed(job: CraftJob, workers: set[str], since: float) -> list[float]:
    """When the main thread of each worker came out of the exchange that the alert had aborted."""
    found = []
    for name in sorted(workers):
        lines = [line for line in job.entries(name) if line["aborted"] is not None and line["told"] >= since]
        if not lines:
            raise JobFailed(f"{name} was not freed by the alert")
        found.append(float(lines[0]["entered"]))
    return found


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    beds = folder / "beds"
    beds.mkdir()
    script = ["--samples", str(args.samples), "--microbatches", str(MICROBATCHES), "--beds", str(beds)]
    trials: list[dict[str, float]] = []
    failed: list[dict[str, str]] = []
    # No limit may free anybody before the alert does.
    with CraftJob(folder / "job", "alerts_craft.py", script, WORKERS) as job:
        assert isinstance(job, CraftJob)
        for number in range(args.trials):
            try:
                trials.append(measure(job, beds, number))
                print(", ".join(f"{key} {1e3 * value:.1f} ms" for key, value in trials[-1].items()), flush=True)
            except JobFailed as error:
                failed.append({"system": "craft", "error": str(error)})
                print(f"FAILED: {error}", flush=True)
                break
    recovery = json.loads((BENCH / "results" / "recovery.json").read_text())
    return {
        "trials": trials,
        "failed": failed,
        "torchft": [kill["recovery_s"] for kill in recovery["kills"]["torchft"]],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="samples of one microbatch")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(conduct("alerts", parse(), run))
