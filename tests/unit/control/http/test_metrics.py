from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from craft.control.http.metrics import render
from craft.control.replay.checkpoints import CheckpointsStatus
from craft.control.replay.status import LighthouseStatus, Status, WorkerStatus, status_of
from craft.decide.job.state import JobState
from craft.protocol.membership import Member
from craft.protocol.messages import StepTimes, WorkerReport

EMPTY = status_of(JobState(slots=4), {}, (), (), LighthouseStatus(pid=1, url="http://127.0.0.1:1"), CheckpointsStatus())


def worker(worker_id: str, rank: int | None = 0) -> WorkerStatus:
    return WorkerStatus(worker_id=worker_id, pid=1, host="a", rank=rank, state="member", step=4)


def samples_of(
    status: Status, lines: Mapping[tuple[str, str], int] = {}, times: Mapping[str, StepTimes] = {}
) -> dict[tuple[str, tuple[str, ...]], float]:
    reports = {each: WorkerReport(member=Member(worker_id=each), pid=1, times=own) for each, own in times.items()}
    return {
        (one.name, tuple(one.labels.values())): one.value
        for family in text_string_to_metric_families(render(status, lines, reports).decode())
        for one in family.samples
    }


def test_a_status_becomes_metrics_that_a_scraper_can_parse() -> None:
    changes: dict[str, Any] = {"step": 4, "total_steps": 9, "faults": 2, "metrics": {'odd "name"\n': 0.5}}
    found = samples_of(replace(EMPTY, **changes, state="running", workers=(worker("w0"), worker("w1"), worker("w2"))))
    assert found["craft_step", ()] == 4
    assert found["craft_total_steps", ()] == 9
    assert found["craft_faults_total", ()] == 2
    assert found["craft_workers", ("member",)] == 3
    assert found["craft_metric", ('odd "name"\n',)] == 0.5
    assert found["craft_job_state", ("running",)] == 1


def test_each_member_has_its_own_times() -> None:
    times = {"w0": StepTimes(microbatch_s=0.25, waiting_s=0.5), "w1": StepTimes(microbatch_s=0.75, computing_s=3.0)}

    found = samples_of(replace(EMPTY, workers=(worker("w0"), worker("w1"), worker("w2", None))), times=times)

    assert found["craft_worker_microbatch_seconds", ("w1",)] == 0.75
    assert found["craft_worker_step_seconds", ("waiting", "w0")] == 0.5
    assert found["craft_worker_step_seconds", ("computing", "w1")] == 3.0


def test_a_worker_without_a_slot_has_no_times() -> None:
    found = samples_of(replace(EMPTY, workers=(worker("w0", None),)), times={"w0": StepTimes(microbatch_s=0.25)})
    assert ("craft_worker_microbatch_seconds", ("w0",)) not in found


def test_every_family_says_what_it_is() -> None:
    assert all(family.documentation for family in text_string_to_metric_families(render(EMPTY, {}, {}).decode()))


def test_an_open_ended_job_has_no_total() -> None:
    assert ("craft_total_steps", ()) not in samples_of(EMPTY)


def test_journal_lines_are_counted_by_what_they_are_about() -> None:
    lines = {("event", "WorkerLost"): 2}
    assert samples_of(EMPTY, lines)["craft_journal_lines_total", ("event", "WorkerLost")] == 2
