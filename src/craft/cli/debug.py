"""``craft debug``: inspect workers of a running job, through the lighthouse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from craft.cli.output.command_errors import explained
from craft.cli.output.echo import echo, echo_json
from craft.cli.output.options import FOLDER, json_option, run_option
from craft.protocol.errors import ConfigError

if TYPE_CHECKING:
    from craft.wire.client import Client

_AT_ONCE = 16
_RUNS = ("starting", "waiting", "member")


@click.command()
@click.argument("worker", required=False)
@run_option
@click.option("--all", "inspect_all", is_flag=True, help="Inspect all workers, and write a bundle of files.")
@click.option("--out", type=FOLDER, help="Where to. Default: in the run directory.")
@json_option("Print one JSON object; not with --all.")
@explained
def debug(worker: str | None, run_dir: Path | None, inspect_all: bool, out: Path | None, as_json: bool) -> None:
    """Show what WORKER is doing: whom it waits for, its last steps, the stacks of its threads.

    It works while the worker is blocked, stopped, or holds its GIL. The worker is not disturbed.

    \b
    Example:
      craft debug w1
      craft debug --all --out hang-of-tuesday
    """
    from craft.settings.rundir import find_run
    from craft.wire.client import Client

    if inspect_all == (worker is not None):
        raise ConfigError("name one worker, or give --all: 'craft status' lists them")
    if out is not None and not inspect_all:
        raise ConfigError("--out is for --all: what is found about one worker is printed")
    run = find_run(run_dir)
    client = Client.of_run(run)
    if worker is not None:
        found = client.debug(worker)
        if as_json:
            echo_json(found)
        else:
            _print(_text(found))
        return
    folder = out if out is not None else run.diagnosis / f"{time.strftime('%Y%m%d-%H%M%S')}-asked"
    _print(_bundle(client, folder))
    echo(f"\nall of it is in {folder}")


def _print(text: str) -> None:
    for line in text.rstrip("\n").split("\n"):
        echo(line)


def _text(found: dict[str, Any]) -> str:
    import msgspec

    from craft.protocol.values.inspection import CloseUp
    from craft.telemetry.explain import bundle

    return bundle.text(msgspec.convert(found, CloseUp))


def _bundle(client: Client, folder: Path) -> str:
    """Inspect all running workers, several at a time, and return the summary."""
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from craft.protocol.values.inspection import CloseUp
    from craft.telemetry.explain import bundle

    runs = [each["worker_id"] for each in client.get_status()["workers"] if each["state"] in _RUNS]

    def look(worker_id: str) -> CloseUp | str:
        try:
            return msgspec.convert(client.debug(worker_id), CloseUp)
        except ConfigError as error:
            return f"{worker_id}: {error}"

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        looked = list(pool.map(look, runs))
    found = [each for each in looked if isinstance(each, CloseUp)]
    missing = [each for each in looked if isinstance(each, str)]
    title = f"Requested by craft debug, {time.strftime('%Y-%m-%d %H:%M:%S')}."
    try:
        bundle.write(folder, title, found, missing)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    return bundle.summary(title, found, missing)
