"""``craft plan``: what each technique costs a job and saves it, and how often to take checkpoints."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from craft.cli.output.command_errors import explained
from craft.cli.output.echo import columns, echo, echo_json
from craft.cli.output.options import FILE, FOLDER, json_option

if TYPE_CHECKING:
    from craft.plan.measured import Measured
    from craft.plan.techniques import Cluster, Row

_ASSUMED, _BENCH, _FLAG = "assumed", "measured by CRAFT's benchmarks", "flag"
_MEASURED_DEFAULTS = ("stall_s",)


def duration(text: str) -> float:
    """Return the seconds of a text such as ``6 min``."""
    from craft.decide.step.interval import parse_duration
    from craft.protocol.errors import ConfigError

    try:
        return parse_duration(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def amount(text: str) -> float:
    """Return a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number") from None
    if not math.isfinite(number) or number < 0:
        raise click.BadParameter(f"{text!r} is not a finite number of at least 0")
    return number


def some_time(text: str) -> float:
    """Return the seconds of a text such as ``6 min``, more than 0."""
    return _positive(duration(text), text)


def some(text: str) -> float:
    """Return a finite number of more than 0."""
    return _positive(amount(text), text)


def _positive(number: float, text: str) -> float:
    if not number:
        raise click.BadParameter(f"{text!r}: it must be more than 0")
    return number


_COUNT, _MANY = click.IntRange(1, 1_000_000), click.IntRange(1, 10**9)
_OPTIONS: tuple[tuple[str, str, Any, str, str], ...] = (
    ("--gpus", "gpus", _COUNT, "N", "GPUs that train.  [default: 1024]"),
    ("--gpus-per-host", "gpus_per_host", _COUNT, "N", "They fail together.  [default: 8]"),
    ("--lost-gpus", "lost_gpus", _COUNT, "N", "GPUs that a failure takes out.  [default: those of a host]"),
    ("--mtbf-gpu", "mtbf_gpu_s", some_time, "TIME", "How long a GPU runs between failures.  [default: 50000 h]"),
    ("--failures-per-day", "failures_per_day", amount, "X", "Of the whole job, in place of --mtbf-gpu."),
    ("--outages-per-month", "outages_per_month", amount, "X", "How often everything ends at once.  [default: 1]"),
    ("--step", "step_s", some_time, "TIME", "An undisturbed step.  [default: 10 s]"),
    ("--microbatches", "microbatches", _MANY, "N", "Of the global batch.  [default: 4 for each GPU]"),
    ("--checkpoint", "checkpoint_s", duration, "TIME", "A checkpoint for which all wait.  [default: 40 s]"),
    ("--stall", "stall_s", duration, "TIME", "What one of CRAFT's holds up.  [default: 8.5% of --checkpoint]"),
    ("--every", "every_s", some_time, "TIME", "How often they are taken today, to compare with."),
    ("--restart", "restart_s", duration, "TIME", "From a failure until a restarted job trains.  [default: 6 min]"),
    ("--replace", "replace_s", duration, "TIME", "From a loss until another host joins.  [default: as --restart]"),
    ("--detect", "detect_s", duration, "TIME", "Until CRAFT sees a loss: its limit on silence.  [default: 1 s]"),
    ("--spares", "spares", click.IntRange(0, 1000), "N", "Each as large as what a failure takes out.  [default: 1]"),
    ("--state-gb", "state_gb", amount, "X", "State that a spare has to get.  [default: 0]"),
    ("--price", "price", amount, "X", "Of a GPU for an hour, in any currency.  [default: 2.5]"),
    ("--weeks", "weeks", some, "X", "Money is counted over so many.  [default: 1]"),
)


def _figures(command: Any) -> Any:
    """Add an option for every figure to a command; None if it is not given."""
    for flag, name, kind, metavar, text in reversed(_OPTIONS):
        command = click.option(flag, name, type=kind, metavar=metavar, default=None, help=text)(command)
    return command


@click.command()
@_figures
@click.option("--dir", "run_dir", type=FOLDER, help="Take what this run shows: workers, step, checkpoints, failures.")
@json_option("Print one JSON object.")
@click.option("--chart", type=FILE, help="Also draw it: FILE.png, .svg or .pdf.")
@explained
def plan(run_dir: Path | None, as_json: bool, chart: Path | None, **figures: Any) -> None:
    """Compare what techniques against failures would cost and save, and say how often to take checkpoints.

    Times have a unit: ms, s, min, h or days. What is not given is assumed; the output says what.

    \b
    Example:
      craft plan --gpus 1024 --mtbf-gpu "50000 h" --step "12 s" --checkpoint "40 s" --restart "6 min" --price 2.5
      craft plan --gpus 256 --failures-per-day 3 --every "30 min" --chart plan.png
      craft plan --dir craft-run-1 --price 2.5
    """
    from craft.plan.techniques import Cluster, compare

    if chart is not None:
        from craft.plan.chart import check_chart, draw

        check_chart(chart)
    given = {name: value for name, value in figures.items() if value is not None}
    if {"mtbf_gpu_s", "failures_per_day"} <= given.keys():
        raise click.UsageError("--mtbf-gpu and --failures-per-day say the same thing: give one of them")
    shown, notes = _shown(run_dir, given) if run_dir is not None else ({}, [])
    cluster = Cluster(**(shown | given))
    rows = compare(cluster)
    origins = _origins(cluster, given, shown, run_dir)
    if as_json:
        from craft.plan.tables import record

        echo_json(record(cluster, rows, origins) | {"notes": notes})
    else:
        _print(cluster, rows, origins, notes)
    if chart is not None:
        draw(cluster, rows, chart)
        echo(f"the chart is in {chart}", err=as_json)


def _shown(run_dir: Path, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a run as fields of a Cluster, and sentences about what it does not show."""
    from craft.plan.measured import measure
    from craft.protocol.errors import ConfigError
    from craft.settings.rundir import find_run
    from craft.telemetry.history import read_run

    run = find_run(run_dir)
    if not run.journal.exists():
        raise ConfigError(f"{run.path} has no journal: name the directory of a run with --dir")
    found = measure(read_run(run.path))
    if found.step_s is None:
        raise ConfigError(f"the run in {run.path} has committed too few steps to take anything from")
    return _fields(found, given), _missing(found)


def _fields(found: Measured, given: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"step_s": found.step_s, "checkpoint_s": found.checkpoint_s, "stall_s": found.stall_s}
    fields["replace_s"] = found.replace_s
    if "gpus" not in given:
        # With another number of workers there would be other microbatches, on other hosts.
        fields |= {"gpus": found.workers, "microbatches": found.microbatches}
        if "gpus_per_host" not in given:
            fields["lost_gpus"] = found.lost_workers or 1
    if "mtbf_gpu_s" not in given and found.failures and found.workers:
        of_each = 86400 * found.failures / found.elapsed_s / found.workers
        fields["failures_per_day"] = of_each * given.get("gpus", found.workers)
    if "detect_s" not in given:
        fields["pause_s"] = found.pause_s
    return {name: value for name, value in fields.items() if value is not None}


def _missing(found: Measured) -> list[str]:
    from craft.plan.tables import lasts

    notes = []
    if not found.failures:
        notes.append(f"the run shows no failures in {lasts(found.elapsed_s)}: their rate is not from it")
    if found.checkpoint_s is None:
        notes.append("the run shows no checkpoints: what they cost is not from it")
    return notes


def _origins(cluster: Cluster, given: dict[str, Any], shown: dict[str, Any], run_dir: Path | None) -> dict[str, str]:
    origins = {name: _BENCH if name in _MEASURED_DEFAULTS else _ASSUMED for name in cluster.__struct_fields__}
    origins |= dict.fromkeys(shown, f"measured in {run_dir}") | dict.fromkeys(given, _FLAG)
    if "mtbf_gpu_s" in given and "failures_per_day" not in given:
        origins["failures_per_day"] = _FLAG
    return origins


def _print(cluster: Cluster, rows: tuple[Row, ...], origins: dict[str, str], notes: list[str]) -> None:
    from craft.plan.tables import HEAD, RIGHT, advice, bars, cells, inputs

    weeks = "a week" if cluster.weeks == 1 else f"{cluster.weeks:g} weeks"
    head = [f"{word} in {weeks}" if word in ("lost", "saved") else word for word in HEAD]
    _print_table([head, *cells(cluster, rows)], RIGHT)
    echo(f"\nMoney lost in {weeks}:")
    block = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    for line in bars(rows, block):
        echo(line)
    echo()
    for line in advice(cluster, rows):
        echo(line)
    echo("\nWhat the names mean:")
    for line in columns([(row.name, row.what) for row in rows]):
        echo(f"  {line}")
    echo("\nWhat this is made from:")
    for line in columns(list(inputs(cluster, origins))):
        echo(f"  {line}")
    for note in notes:
        echo(f"  {note}")


def _print_table(rows: list[Any], right: tuple[int, ...]) -> None:
    """Print with rich on a terminal, as plain columns otherwise."""
    if not sys.stdout.isatty():
        for line in columns(rows, right):
            echo(line)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if place in right else "left")
    for row in rows[1:]:
        table.add_row(*row)
    Console(highlight=False).print(table)
