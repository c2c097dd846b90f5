"""``craft status``, ``events``, ``fail``, ``stop`` and others: inspect a running job, and act on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from craft.cli.output.command_errors import explained
from craft.cli.output.echo import echo, echo_json
from craft.cli.output.options import FiniteNumber, json_option, reason_option, run_option


def _client(run_dir: Path | None) -> Any:
    from craft.settings.rundir import find_run
    from craft.wire.client import Client

    return Client.of_run(find_run(run_dir))


@click.command()
@run_option
@json_option("Print the whole status as one JSON object.")
@explained
def status(run_dir: Path | None, as_json: bool) -> None:
    """Show the state of a job: its step, its workers, its faults.

    \b
    Example:
      craft status
      craft status --dir craft-run-1 --json
    """
    found = _client(run_dir).get_status()
    if as_json:
        echo_json(found)
    else:
        _print_status(found)


@click.command()
@run_option
@click.option("--follow", is_flag=True, help="Go on printing what happens, until the job ends.")
@json_option("Print the journal's own lines.")
@explained
def events(run_dir: Path | None, follow: bool, as_json: bool) -> None:
    """Print what happened, what was decided and why.

    Reads the journal of a job whose lighthouse is gone from its run directory.

    \b
    Example:
      craft events --follow
    """
    for line in _lines(run_dir, follow):
        if as_json:
            echo_json(line)
        else:
            echo(_sentence(line))


@click.command()
@click.argument("worker")
@run_option
@reason_option("reported by a person")
@explained
def fail(worker: str, run_dir: Path | None, reason: str) -> None:
    """Declare WORKER failed: it is ended, and the others go on without it.

    \b
    Example:
      craft fail w3 --reason "its fan is loud"
    """
    answer = _client(run_dir).report_failure(worker_id=worker, reason=reason)
    if answer["already"]:
        echo(f"worker {worker} was gone already")
        return
    echo(f"worker {worker} is out")
    _print_actions(answer)


@click.command()
@run_option
@reason_option()
@explained
def abort(run_dir: Path | None, reason: str) -> None:
    """Abort what every worker is blocked in: all abort their exchange and meet again; nothing is lost.

    If one of them hangs in its own code, name it with 'craft fail' instead: the others go on without it.

    \b
    Example:
      craft abort --reason "the switch was rebooted"
    """
    answer = _client(run_dir).abort(reason)
    echo("all workers meet again" if answer["actions"] else "there is nothing to abort: no generation runs")
    _print_actions(answer)


@click.command()
@click.argument("name", metavar="WORKER|HOST")
@run_option
@reason_option()
@click.option("--deadline", type=FiniteNumber(min=0), help="Seconds after which it is ended, whether it left or not.")
@explained
def drain(name: str, run_dir: Path | None, reason: str, deadline: float | None) -> None:
    """Let WORKER, or all workers of HOST, leave at the next step boundary: nothing is lost or computed again.

    With a spare, that one takes the slot at the same boundary. A worker that was drained is not replaced by a new one.

    \b
    Example:
      craft drain w3 --reason "its fan is loud"
      craft drain node7 --deadline 60
    """
    client = _client(run_dir)
    workers = {worker["worker_id"] for worker in client.get_status()["workers"]}
    subject = {"worker_id": name} if name in workers else {"host": name}
    answer = client.drain(**subject, reason=reason, deadline_s=deadline)
    if answer["already"]:
        echo(f"{name} was leaving, or gone, already")
        return
    proposed = [action for action in answer["actions"] if action["action"] == "Propose"]
    echo(
        f"{name} leaves at the next step boundary" if proposed else f"{name} leaves as soon as others can do without it"
    )
    _print_actions(answer)


@click.command()
@run_option
@reason_option("stopped by a person")
@explained
def stop(run_dir: Path | None, reason: str) -> None:
    """Stop the job.

    \b
    Example:
      craft stop --reason "enough"
    """
    answer = _client(run_dir).stop(reason)
    echo("the job was stopping already" if answer["already"] else "the job ends after the step in flight")


@click.command()
@run_option
@reason_option()
@click.option("--deadline", type=FiniteNumber(min=0), help="Seconds after which it ends, saved or not.")
@explained
def preempt(run_dir: Path | None, reason: str, deadline: float | None) -> None:
    """Preempt the job: it takes a checkpoint at the next step boundary and ends with exit code 75.

    'craft run --resume' goes on from there. SIGTERM to 'craft run' does the same, with the deadline of drain_limit_s.

    \b
    Example:
      craft preempt --deadline 60
    """
    answer = _client(run_dir).preempt(reason, deadline)
    if answer["already"]:
        echo("the job was ending already")
        return
    echo("the job takes a checkpoint at the next step boundary, and ends")
    _print_actions(answer)


@click.command()
@run_option
@click.option("--tag", help="Keep the checkpoint for good, under this name.")
@reason_option()
@explained
def checkpoint(run_dir: Path | None, tag: str | None, reason: str) -> None:
    """Take a checkpoint at the next step boundary.

    \b
    Example:
      craft checkpoint --tag before-the-lr-drop
    """
    _client(run_dir).checkpoint(reason, tag)
    echo("a checkpoint is taken at the next step boundary; 'craft status' shows when it is complete")


def _lines(run_dir: Path | None, follow: bool) -> Any:
    from craft.protocol.errors import Unreachable
    from craft.settings.rundir import find_run
    from craft.telemetry.records.journal_reader import as_record, read_journal
    from craft.wire.client import Client

    run = find_run(run_dir)
    try:
        yield from filter(None, map(as_record, Client.of_run(run).events(follow)))
    except Unreachable:
        # The job is over or its lighthouse is down: the file has all that happened.
        yield from read_journal(run.journal)


def _print_actions(answer: dict[str, Any]) -> None:
    for action in answer["actions"]:
        echo(f"  {action['action']}: {action['reason']}")


def _sentence(line: dict[str, Any]) -> str:
    """Return one line of the journal for people."""
    from craft.telemetry.explain.amounts import clock
    from craft.telemetry.explain.sentences import detail

    kind = str(line.get("kind", "?"))
    moment = clock(line.get("time", 0.0))
    if words := detail(line):
        return f"{moment} {kind:7} {line.get(kind, ''):18} {words}"
    rest = {name: value for name, value in line.items() if name not in ("time", "kind", kind, "reason", "traceback")}
    parts = " ".join(f"{name}={_short(value)}" for name, value in rest.items() if value is not None)
    reason = f'  "{line["reason"]}"' if line.get("reason") else ""
    return f"{moment} {kind:7} {line.get(kind, ''):18} {parts}{reason}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("worker_id", json.dumps(value)))
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _print_status(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from craft.telemetry.explain.amounts import clock
    from craft.telemetry.text.plain_text import one_line

    total = f" of {found['total_steps']}" if found["total_steps"] is not None else ""
    pace = f", {found['step_s']:.3g} s a step" if found["step_s"] else ""
    echo(f"{found['state']}: step {found['step']}{total}, generation {found['generation']}{pace}")
    if found["reason"]:
        echo(found["reason"])
    if found["metrics"]:
        echo("  ".join(f"{name} {value:.6g}" for name, value in found["metrics"].items()))
    # A spare has a position, at which it was started, and no replica.
    slot = ("replica", "position") if found.get("replica_size", 1) > 1 else ()
    columns = ("worker_id", "state", "rank", *slot, "step", "host", "pid")
    table = Table("worker", *columns[1:], box=None, header_style="bold")
    for worker in found["workers"]:
        row = (worker.get(name) for name in columns)
        table.add_row(*(Text("-" if cell is None else one_line(cell)) for cell in row))
    Console(highlight=False, soft_wrap=True).print(table)
    echo(f"faults: {found['faults']}")
    for fault in found["fault_list"][-5:]:
        lost_ms = (fault.get("cost") or {}).get("lost_ms")
        cost = "" if lost_ms is None else f" ({lost_ms:.0f} ms lost)"
        echo(f"  {clock(fault['seen'])} {', '.join(fault['worker_ids'])}: {fault['reason']}{cost}")
    _print_checkpoints(found["checkpoints"])
    echo(f"lighthouse: {found['lighthouse']['url']} (pid {found['lighthouse']['pid']})")


def _print_checkpoints(found: dict[str, Any]) -> None:
    from craft.telemetry.explain.amounts import checkpoint, clock

    last = found["last"]
    if not found["taken"] and last is None:
        return
    newest = f"newest at {clock(last['time'])}: {checkpoint(last)}" if last is not None else "none is complete yet"
    echo(f"checkpoints: {found['written']} written, {newest}")
    if found["restored"] is not None:
        echo(f"  this run went on from {found['restored']}")
    if found["interval_s"] is not None:
        echo(f"  every {found['interval_s']:.3g} s: {found['reason']}")
    if found["failures"]:
        echo(f"  {found['failures']} failures to write, the last of {found['failure']}")
