"""Expose the status of the job in Prometheus' text format: ``GET /metrics``, sampled when it is scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from craft.control.replay.checkpoints import CheckpointsStatus
from craft.control.replay.status import Status
from craft.protocol.messages import StepTimes, WorkerReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    """Hands families that are made already to a registry, which knows their format."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(status: Status, journaled: Mapping[tuple[str, str], int], reports: Mapping[str, WorkerReport]) -> bytes:
    """Return the text that a scraper reads; ``journaled``: how often each (kind, name) was written to the journal."""
    registry = CollectorRegistry(auto_describe=False)
    members = {worker.worker_id for worker in status.workers if worker.rank is not None}
    times = {each: reports[each].times for each in sorted(members & reports.keys())}
    registry.register(
        _Families([*_job(status), *_checkpoints(status.checkpoints), *_labelled(status, journaled), *_times(times)])
    )
    return generate_latest(registry)


def _job(status: Status) -> Iterator[Metric]:
    agents = sum(agent.connected for agent in status.agents)
    yield GaugeMetricFamily("craft_step", "Committed steps.", value=status.step)
    if status.total_steps is not None:
        yield GaugeMetricFamily("craft_total_steps", "Steps that the job is to have.", value=status.total_steps)
    yield GaugeMetricFamily("craft_step_seconds", "Smoothed time from commit to commit.", value=status.step_s)
    yield GaugeMetricFamily("craft_generation", "Number of the current generation.", value=status.generation)
    yield GaugeMetricFamily("craft_slots", "Workers that the job is laid out for.", value=status.slots)
    yield GaugeMetricFamily("craft_agents", "Agents that are connected.", value=agents)
    yield CounterMetricFamily("craft_faults", "Losses of workers or hosts.", value=status.faults)


def _checkpoints(found: CheckpointsStatus) -> Iterator[Metric]:
    yield CounterMetricFamily("craft_checkpoints", "Complete checkpoints.", value=found.written)
    if (last := found.last) is not None:
        yield GaugeMetricFamily("craft_checkpoint_last_step", "Committed steps in the newest one.", value=last.step)
        yield GaugeMetricFamily("craft_checkpoint_last_time_seconds", "When it was complete.", value=last.time)
    yield CounterMetricFamily("craft_checkpoint_bytes", "Size of all of them.", value=found.total_bytes)
    yield CounterMetricFamily("craft_checkpoint_new_bytes", "What of that had to be written.", value=found.new_bytes)
    yield CounterMetricFamily("craft_checkpoint_failures", "Shares that could not be written.", value=found.failures)


def _labelled(status: Status, journaled: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    workers = GaugeMetricFamily("craft_workers", "Workers by state.", labels=["state"])
    for state, count in sorted(Counter(worker.state for worker in status.workers).items()):
        workers.add_metric([state], count)
    yield workers
    if isinstance(status.replica_size, int):
        yield _slots(status)
    job = GaugeMetricFamily("craft_job_state", "1 for the state that the job is in.", labels=["state"])
    job.add_metric([status.state], 1)
    yield job
    logged = GaugeMetricFamily("craft_metric", "What the script logs, as of the last step.", labels=["name"])
    for name, value in sorted(status.metrics.items()):
        logged.add_metric([name], value)
    yield logged
    lines = CounterMetricFamily("craft_journal_lines", "Lines of the journal.", labels=["kind", "name"])
    for (kind, name), count in sorted(journaled.items()):
        lines.add_metric([kind, name], count)
    yield lines


def _slots(status: Status) -> Metric:
    slots = GaugeMetricFamily(
        "craft_worker_slot",
        "1 for the replica and the position of each member.",
        labels=["worker_id", "replica", "position"],
    )
    for worker in status.workers:
        if isinstance(worker.replica, int):
            slots.add_metric([worker.worker_id, str(worker.replica), str(worker.position)], 1)
    return slots


def _times(by_member: Mapping[str, StepTimes | None]) -> Iterator[Metric]:
    one = GaugeMetricFamily(
        "craft_worker_microbatch_seconds",
        "Smoothed time that a worker takes to load and compute one microbatch.",
        labels=["worker_id"],
    )
    parts = GaugeMetricFamily(
        "craft_worker_step_seconds",
        "Smoothed time that a worker spends in each part of a step; waiting is for what others have not computed yet.",
        labels=["worker_id", "part"],
    )
    for worker_id, times in by_member.items():
        if times is not None:
            one.add_metric([worker_id], times.microbatch_s)
            for part in ("loading", "computing", "exchanging", "waiting", "updating"):
                parts.add_metric([worker_id, part], getattr(times, f"{part}_s"))
    yield one
    yield parts
