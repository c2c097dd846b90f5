from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from craft.protocol.messages import StepTimes
from craft.telemetry.metrics import LineCounter, Sample, registry_of, render


def samples_of(sample: Sample) -> dict[tuple[str, tuple[str, ...]], float]:
    text = render(registry_of(lambda: sample)).decode()
    return {
        (one.name, tuple(one.labels.values())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_sample_becomes_metrics_that_a_scraper_can_parse() -> None:
    found = samples_of(
        Sample(step=4, total_steps=9, faults=2, workers={"member": 3}, metrics={'odd "name"\n': 0.5}, state="running")
    )
    assert found["craft_step", ()] == 4
    assert found["craft_total_steps", ()] == 9
    assert found["craft_faults_total", ()] == 2
    assert found["craft_workers", ("member",)] == 3
    assert found["craft_metric", ('odd "name"\n',)] == 0.5
    assert found["craft_job_state", ("running",)] == 1


def test_each_worker_has_its_own_times() -> None:
    times = {"w0": StepTimes(microbatch_s=0.25, waiting_s=0.5), "w1": StepTimes(microbatch_s=0.75, computing_s=3.0)}

    found = samples_of(Sample(times=times))

    assert found["craft_worker_microbatch_seconds", ("w1",)] == 0.75
    assert found["craft_worker_step_seconds", ("waiting", "w0")] == 0.5
    assert found["craft_worker_step_seconds", ("computing", "w1")] == 3.0


def test_every_family_says_what_it_is() -> None:
    text = render(registry_of(Sample)).decode()
    assert all(family.documentation for family in text_string_to_metric_families(text))


def test_an_open_ended_job_has_no_total() -> None:
    assert ("craft_total_steps", ()) not in samples_of(Sample())


def test_journal_lines_are_counted_by_what_they_are_about() -> None:
    counter = LineCounter()
    for _ in range(2):
        counter({"kind": "event", "event": "WorkerLost"})
    assert samples_of(Sample(lines=counter.counts))["craft_journal_lines_total", ("event", "WorkerLost")] == 2
