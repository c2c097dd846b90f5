"""Predict what each technique costs a job and saves it. Pure: figures of a cluster in, one row per technique out.

``craft plan`` calls it. The formulas are in ``lost_time.py``; where they and the defaults come from is in docs/howto/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from craft.decide.step.plan import cost_of_loss
from craft.plan.lost_time import Absence, best_interval, saved_share, working_share
from craft.protocol.errors import ConfigError

STALL_SHARE = 40.0 / 468.7
"""Stall of a CRAFT checkpoint as a share of torch.save's (bench/results/checkpoints.txt)."""
ASYNC_SAVE_SHARE = 265.2 / 468.7
"""The same of torch.distributed.checkpoint.async_save (bench/results/checkpoints.txt)."""
REGROUP_S = 0.0332
"""From SIGKILL to the others' next commit, beyond one step: the median (bench/results/recovery.txt)."""
TORCHFT_PAUSE_S = 5.028
"""The same for torchft with the settings of its README (bench/results/recovery.txt)."""
TORCHFT_STEP_S = 0.012
"""By how much a step of torchft is longer, with 4 workers and steps of 36.5 ms: 0.336 of one (bench/results/overhead.txt)."""
SPARE_S = 0.153
"""From SIGKILL to the next commit with a spare in the slot (bench/results/healing.txt)."""
TRANSFER_GB_PER_S = 2.12
"""Rate at which a joiner receives state in one stripe (bench/results/transfer.txt)."""
MICROBATCHES_PER_WORKER = 4
_WEEK_S, _DAY_S, _MONTH_S = 7 * 86400.0, 86400.0, 30 * 86400.0


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster that the plan is for. A worker has one GPU."""

    gpus: int = 1024
    """GPUs that train."""
    gpus_per_host: int | None = None
    """GPUs of a host; None: 8, or all if there are fewer."""
    lost_gpus: int | None = None
    """GPUs that one failure takes out; None: those of a host."""
    mtbf_gpu_s: float = 50_000 * 3600.0
    """Mean time between failures of one GPU, its host or its network link."""
    failures_per_day: float | None = None
    """Failures of the whole job; None: from the number of GPUs and ``mtbf_gpu_s``."""
    outages_per_month: float = 1.0
    """How often the whole cluster fails at once: power, network, storage, maintenance."""
    step_s: float = 10.0
    """An undisturbed step."""
    microbatches: int | None = None
    """Of the global batch; None: 4 per GPU. With more, a step grows less when a worker is missing."""
    checkpoint_s: float = 40.0
    """How long a blocking checkpoint stalls training."""
    stall_s: float | None = None
    """How long one of CRAFT's does; None: 8.5% of that, as measured."""
    every_s: float | None = None
    """How often checkpoints are taken today; None: at the best interval."""
    restart_s: float = 360.0
    """From a failure until the restarted job trains: detection, queue, start, reading the checkpoint."""
    replace_s: float | None = None
    """From a loss until another host joins; None: as long as a restart."""
    detect_s: float = 1.0
    """Time to detect a loss: the heartbeat limit."""
    pause_s: float | None = None
    """What a loss costs the others at once; None: detection, regrouping and the redone microbatches."""
    spares: int = 1
    """Spares, each with as many GPUs as a failure takes out."""
    state_gb: float = 0.0
    """State that a spare has to receive."""
    price: float = 2.5
    """Price of a GPU hour."""
    weeks: float = 1.0
    """Money is counted over this many weeks."""

    def __post_init__(self) -> None:
        if self.lost > self.gpus or (self.gpus_per_host or 0) > self.gpus:
            raise ConfigError(f"{self.gpus} GPUs are fewer than a host has, or a failure takes out: {self.lost}")
        if self.gpus % self.lost:
            raise ConfigError(
                f"{self.gpus} GPUs are no whole number of {self.lost}, which fail together: change one of the two"
            )

    @property
    def lost(self) -> int:
        """GPUs of a unit: what one failure takes out."""
        return self.lost_gpus or self.gpus_per_host or min(8, self.gpus)

    @property
    def num_units(self) -> int:
        return self.gpus // self.lost

    @property
    def failure_rate(self) -> float:
        """Failures per second that take out a unit."""
        if self.failures_per_day is not None:
            return self.failures_per_day / _DAY_S
        return self.gpus / self.mtbf_gpu_s

    @property
    def outage_rate(self) -> float:
        return self.outages_per_month / _MONTH_S

    @property
    def num_microbatches(self) -> int:
        return self.microbatches or MICROBATCHES_PER_WORKER * self.gpus

    @property
    def stall(self) -> float:
        return STALL_SHARE * self.checkpoint_s if self.stall_s is None else self.stall_s

    @property
    def replaced_after_s(self) -> float:
        return self.restart_s if self.replace_s is None else self.replace_s

    def slower(self, missing: int) -> float:
        """Return the factor by which a step takes longer with so many units missing."""
        return cost_of_loss(self.num_microbatches, self.gpus, missing * self.lost)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One technique, with what it costs."""

    name: str
    what: str
    """A sentence for people."""
    goodput: float
    """Share of the time in which the training GPUs make progress, 0 to 1."""
    interval_s: float | None
    """Work between two checkpoints; None: no checkpoint is needed."""
    exact: bool
    """Every sample is used once, in batches of the same size."""
    left_out: float
    """Share of the samples that are never used."""
    paid: float
    """Money for all GPUs, spares included."""
    lost: float
    """The part of it that bought no progress."""
    saves: float = 0.0
    """How much less is lost than with the first row."""


def compare(cluster: Cluster) -> tuple[Row, ...]:
    """Return a row for each technique. The first is the baseline: restarting from checkpoints."""
    rows = [*_restarts(cluster), _torchft(cluster), _shrink(cluster), _wait(cluster, 0), _redo(cluster, 0)]
    if cluster.spares:
        rows[-1:-1] = [_wait(cluster, cluster.spares)]
        rows.append(_redo(cluster, cluster.spares))
    return tuple(msgspec.structs.replace(row, saves=rows[0].lost - row.lost) for row in rows)


def advise(rows: tuple[Row, ...]) -> Row:
    """Return the exact technique that loses the least money; the first among equals."""
    return min((row for row in rows if row.exact), key=lambda row: row.lost)


def best_spares(cluster: Cluster, most: int = 16) -> int:
    """Return the number of spares with which ``redo`` loses the least money."""
    return min(range(most + 1), key=lambda spares: _redo(cluster, spares).lost)


def interval(cluster: Cluster, rate: float, stall_s: float, write_s: float = 0.0) -> float:
    """Return the best feasible interval: at least a step, and twice the time that writing takes."""
    return max(best_interval(rate, stall_s), cluster.step_s, 2 * write_s)


def _restarts(cluster: Cluster) -> list[Row]:
    rate = cluster.failure_rate + cluster.outage_rate

    def row(name: str, what: str, every_s: float, stall_s: float, write_s: float = 0.0) -> Row:
        share = saved_share(rate, every_s, stall_s, cluster.restart_s + write_s)
        return _row(cluster, name, what, share, every_s, exact=True)

    best = interval(cluster, rate, cluster.checkpoint_s)
    rows = [row("restart-best", "start again, checkpoints at the best interval", best, cluster.checkpoint_s)]
    if cluster.every_s is not None:
        today = "start again, checkpoints as given"
        rows.insert(0, row("restart", today, max(cluster.every_s, cluster.step_s), cluster.checkpoint_s))
    beside = interval(cluster, rate, cluster.stall, cluster.checkpoint_s)
    ours = "start again from CRAFT's checkpoints, written beside training"
    return [*rows, row("restart-craft", ours, beside, cluster.stall, cluster.checkpoint_s)]


def _redo(cluster: Cluster, spares: int) -> Row:
    pause_s = cluster.detect_s + REGROUP_S + (cluster.slower(1) - 1) * cluster.step_s
    with_spares = f"redo, {spares} spare{'s' * (spares != 1)}: a spare takes the place at once"
    what = with_spares if spares else "redo: survivors compute it, a replacement joins later"
    return _goes_on(cluster, "redo-spares" if spares else "redo", what, pause_s, spares, _speed(cluster))


def _shrink(cluster: Cluster) -> Row:
    # Only the lost workers' microbatches of the step in flight are dropped; later steps have all of them.
    left_out = min(1.0, cluster.failure_rate * cluster.step_s / cluster.num_units)
    what = "shrink: the lost microbatches are dropped"
    pause_s = cluster.detect_s + REGROUP_S
    return _goes_on(cluster, "shrink", what, pause_s, 0, _speed(cluster), left_out=left_out)


def _wait(cluster: Cluster, spares: int) -> Row:
    # The replacement computes the lost microbatches while the others wait.
    pause_s = cluster.detect_s + REGROUP_S + cluster.step_s
    what = f"wait, {spares} spare{'s' * (spares != 1)}" if spares else "wait: all wait for a replacement"
    name = "wait-spares" if spares else "wait"
    return _goes_on(cluster, name, what, pause_s, spares, lambda missing: 1.0 if missing == 0 else 0.0)


def _torchft(cluster: Cluster) -> Row:
    """Survivors keep their share: the batch is smaller until a replacement joins. The step in flight is dropped."""
    units, pause_s = cluster.num_units, TORCHFT_PAUSE_S + cluster.step_s
    absence = _absence(cluster, pause_s, 0)
    chances = [(chance, missing / units) for missing, chance in absence.working(units) if missing < units]
    gone = sum(chance * share for chance, share in chances) / (sum(chance for chance, _ in chances) or 1.0)
    left_out = min(1.0, gone + cluster.failure_rate * cluster.step_s)
    slower = cluster.step_s / (cluster.step_s + TORCHFT_STEP_S)

    def speed(missing: int) -> float:
        return slower * (units - missing) / units

    what = "torchft: a smaller batch until another joins"
    stall_s = ASYNC_SAVE_SHARE * cluster.checkpoint_s
    return _goes_on(cluster, "torchft", what, pause_s, 0, speed, left_out=left_out, stall_s=stall_s)


def _speed(cluster: Cluster) -> Callable[[int], float]:
    return lambda missing: 1 / cluster.slower(missing)


def _absence(cluster: Cluster, pause_s: float, spares: int) -> Absence:
    return Absence(
        rate=cluster.failure_rate,
        pause_s=pause_s,
        join_s=cluster.detect_s + SPARE_S + cluster.state_gb / TRANSFER_GB_PER_S,
        replace_s=cluster.replaced_after_s,
        spares=spares,
    )


def _goes_on(
    cluster: Cluster,
    name: str,
    what: str,
    pause_s: float,
    spares: int,
    speed: Callable[[int], float],
    left_out: float | None = None,
    stall_s: float | None = None,
) -> Row:
    """A technique that loses nothing while a worker survives: checkpoints only serve the loss of all."""
    units = cluster.num_units
    if cluster.pause_s is not None and name != "torchft":
        pause_s = cluster.pause_s
    absence = _absence(cluster, pause_s, spares)
    rate = cluster.outage_rate + absence.end_rate(units)
    stall_s = cluster.stall if stall_s is None else stall_s
    every_s = interval(cluster, rate, stall_s, cluster.checkpoint_s)
    share = saved_share(rate, every_s, stall_s, cluster.restart_s + cluster.checkpoint_s)
    # With a single unit, the rate above includes its loss.
    share *= working_share(absence, units, speed) if units > 1 else 1.0
    return _row(cluster, name, what, share, every_s, left_out is None, left_out or 0.0, spares)


def _row(
    cluster: Cluster,
    name: str,
    what: str,
    goodput: float,
    every_s: float,
    exact: bool,
    left_out: float = 0.0,
    spares: int = 0,
) -> Row:
    hours = cluster.weeks * _WEEK_S / 3600
    paid = cluster.price * hours * (cluster.gpus + spares * cluster.lost)
    return Row(
        name=name,
        what=what,
        goodput=goodput,
        interval_s=every_s if every_s < math.inf else None,
        exact=exact,
        left_out=left_out,
        paid=paid,
        lost=paid - cluster.price * hours * cluster.gpus * goodput,
    )
