"""``craft why``: the timeline of a fault, from the files of a run. Needs no lighthouse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from craft.cli.output.command_errors import explained
from craft.cli.output.echo import echo, echo_json
from craft.cli.output.options import json_option, run_option

if TYPE_CHECKING:
    from craft.telemetry.explain.timeline import Timeline, TimelineEntry
    from craft.telemetry.history import Run


@click.command()
@click.argument("number", required=False, type=click.IntRange(min=1), metavar="[N]")
@click.option("--all", "everything", is_flag=True, help="Tell of all faults, not just of the last one.")
@run_option
@click.option(
    "--host",
    "hosts",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="In a job of several hosts: the run directory of one, for what its workers wrote down. Again for each.",
)
@json_option("Print JSON: one object, or a list with --all.")
@explained
def why(number: int | None, everything: bool, run_dir: Path | None, hosts: tuple[Path, ...], as_json: bool) -> None:
    """Show what happened in the last fault, or in the Nth: who saw what, what was decided and why, what it cost.

    Reads the files of the run, whether the job runs or is over.

    \b
    Example:
      craft why
      craft why 2 --dir craft-run-1
      craft why --all --json
    """
    from craft.settings.rundir import find_run

    found = _timelines(_read(find_run(run_dir).path, hosts))
    if everything:
        chosen = found
    else:
        chosen = [_chosen(found, number)] if found or number is not None else []
    if as_json:
        _print_json(chosen, everything)
    elif not chosen:
        echo("nothing to explain: no worker was lost, and no exchange broke")
    else:
        for number, each in enumerate(chosen):
            _print_story(each, len(found), first=not number)


def _read(path: Path, hosts: Iterable[Path]) -> Run:
    import msgspec

    from craft.protocol.errors import ConfigError
    from craft.telemetry.history import read_run

    run = read_run(path)
    if not run.journal:
        raise ConfigError(
            f"{path} has no journal: name the run directory of the job, or of its lighthouse if it has several hosts,"
            " with --dir"
        )
    for host in hosts:
        other = read_run(host)
        run = msgspec.structs.replace(
            run, commits={**run.commits, **other.commits}, entries={**run.entries, **other.entries}
        )
    return run


def _timelines(run: Run) -> list[Timeline]:
    from craft.telemetry.explain.incidents import incidents
    from craft.telemetry.explain.timeline import timeline

    return [timeline(run, incident, number) for number, incident in enumerate(incidents(run.journal), 1)]


def _chosen(found: list[Timeline], number: int | None) -> Timeline:
    from craft.protocol.errors import ConfigError

    if number is None:
        return found[-1]
    if number > len(found):
        there = "none" if not found else "one" if len(found) == 1 else str(len(found))
        raise ConfigError(f"there is no fault {number} in this run, which had {there}: 'craft why --all' shows all")
    return found[number - 1]


def _print_json(chosen: list[Timeline], everything: bool) -> None:
    import msgspec

    values = [msgspec.to_builtins(each) for each in chosen]
    echo_json(values if everything else values[0] if values else None)


def _replicas(found: Timeline) -> list[str]:
    if not isinstance(found.replicas, dict):
        return []
    each = "; ".join(f"{number}: {', '.join(workers)}" for number, workers in found.replicas.items())
    return [f"replicas in generation {found.generation}: {each}"]


def _print_story(found: Timeline, number: int, *, first: bool) -> None:
    from craft.telemetry.explain.amounts import precise_clock

    width = max((len(each.who) for each in found.moments), default=0)
    lines = [
        *(() if first else ("",)),
        f"fault {found.number} of {number}, at {precise_clock(found.began)}, in generation {found.generation}: {found.title}",
        *_replicas(found),
        "",
        *(_line(each, width) for each in found.moments),
        "",
        f"it cost: {found.outcome}",
        *(f"in the place of {lost}: {other}" for lost, other in found.places.items()),
    ]
    for line in lines:
        echo(line)


def _line(moment: TimelineEntry, width: int) -> str:
    return f"{moment.at_ms:10.1f} ms  {moment.who:{width}}  {moment.what}"
