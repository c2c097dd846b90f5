"""Expose a job's status in Prometheus' text format, sampled when it is scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from craft.protocol.messages import StepTimes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Sample:
    """All measured values at one moment."""

    step: int = 0
    total_steps: int | None = None
    step_s: float = 0.0
    generation: int = 0
    slots: int = 0
    faults: int = 0
    agents: int = 0
    state: str = ""
    workers: Mapping[str, int] = field(default_factory=dict)
    """How many workers are in which state."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the script logs."""
    checkpoints: int = 0
    checkpoint_step: int | None = None
    """Step of the newest checkpoint, if there is one."""
    checkpoint_time: float = 0.0
    checkpoint_bytes: int = 0
    """Of all checkpoints that were written."""
    checkpoint_new_bytes: int = 0
    checkpoint_failures: int = 0
    lines: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """How often each (kind, name) was written to the journal."""
    times: Mapping[str, StepTimes] = field(default_factory=dict)
    """Where the time of a step goes, by member."""


class JobCollector(Collector):
    """Turns a Sample into metric families."""

    def __init__(self, sample: Callable[[], Sample]) -> None:
        self._sample = sample

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise the registry would take a sample on registration."""
        return ()

    def collect(self) -> Iterable[Metric]:
        sample = self._sample()
        yield GaugeMetricFamily("craft_step", "Committed steps.", value=sample.step)
        if sample.total_steps is not None:
            yield GaugeMetricFamily("craft_total_steps", "Steps that the job is to have.", value=sample.total_steps)
        yield GaugeMetricFamily("craft_step_seconds", "Smoothed time from commit to commit.", value=sample.step_s)
        yield GaugeMetricFamily("craft_generation", "Number of the current generation.", value=sample.generation)
        yield GaugeMetricFamily("craft_slots", "Workers that the job is laid out for.", value=sample.slots)
        yield GaugeMetricFamily("craft_agents", "Agents that are connected.", value=sample.agents)
        yield CounterMetricFamily("craft_faults", "Losses of workers or hosts.", value=sample.faults)
        yield from self._checkpoints(sample)
        yield from self._labelled(sample)
        yield from self._times(sample)

    def _checkpoints(self, sample: Sample) -> Iterable[Metric]:
        yield CounterMetricFamily("craft_checkpoints", "Complete checkpoints.", value=sample.checkpoints)
        if sample.checkpoint_step is not None:
            step, time = sample.checkpoint_step, sample.checkpoint_time
            yield GaugeMetricFamily("craft_checkpoint_last_step", "Committed steps in the newest one.", value=step)
            yield GaugeMetricFamily("craft_checkpoint_last_time_seconds", "When it was complete.", value=time)
        yield CounterMetricFamily("craft_checkpoint_bytes", "Size of all of them.", value=sample.checkpoint_bytes)
        new = sample.checkpoint_new_bytes
        yield CounterMetricFamily("craft_checkpoint_new_bytes", "What of that had to be written.", value=new)
        failures = sample.checkpoint_failures
        yield CounterMetricFamily("craft_checkpoint_failures", "Shares that could not be written.", value=failures)

    def _labelled(self, sample: Sample) -> Iterable[Metric]:
        workers = GaugeMetricFamily("craft_workers", "Workers by state.", labels=["state"])
        for state, count in sorted(sample.workers.items()):
            workers.add_metric([state], count)
        yield workers
        job = GaugeMetricFamily("craft_job_state", "1 for the state that the job is in.", labels=["state"])
        job.add_metric([sample.state], 1)
        yield job
        logged = GaugeMetricFamily("craft_metric", "What the script logs, as of the last step.", labels=["name"])
        for name, value in sorted(sample.metrics.items()):
            logged.add_metric([name], value)
        yield logged
        lines = CounterMetricFamily("craft_journal_lines", "Lines of the journal.", labels=["kind", "name"])
        for (kind, name), count in sorted(sample.lines.items()):
            lines.add_metric([kind, name], count)
        yield lines

    def _times(self, sample: Sample) -> Iterable[Metric]:
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
        for worker_id, times in sorted(sample.times.items()):
            one.add_metric([worker_id], times.microbatch_s)
            for part in ("loading", "computing", "exchanging", "waiting", "updating"):
                parts.add_metric([worker_id, part], getattr(times, f"{part}_s"))
        yield one
        yield parts


class LineCounter:
    """Counts journal lines by kind and name; a listener of a Journal."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def __call__(self, line: Mapping[str, object]) -> None:
        kind = str(line.get("kind", ""))
        self.counts[kind, str(line.get(kind, ""))] += 1


def registry_of(sample: Callable[[], Sample]) -> CollectorRegistry:
    """Return a new registry that samples by calling ``sample``."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(sample))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Return the text that a scraper reads."""
    return generate_latest(registry)
