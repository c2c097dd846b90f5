"""Find the checkpoints that a command means, and show the progress of reading them. For ``commands.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from craft.cli.output.echo import echo
from craft.protocol.errors import ConfigError

if TYPE_CHECKING:
    from craft.snapshots.store.manifest import Manifest
    from craft.snapshots.store.store import Store
    from craft.snapshots.store.tiers import Tiers


def to_export(place: str, which: str | None) -> tuple[Tiers, Manifest]:
    """Return the named checkpoint; without a name, the newest that is not suspect."""
    from craft.snapshots.checkpoint.catalog import select

    tiers, found, _ = listed(place)
    if which is None:
        found = [each for each in found if not doubts_about(tiers, each)] or found
    manifest = select(found, tiers.url, which)
    for doubt in doubts_about(tiers, manifest):
        echo(f"craft: warning: {doubt}", err=True)
    return tiers, manifest


def doubts_about(tiers: Tiers, manifest: Manifest) -> list[str]:
    from craft.snapshots.checkpoint.suspect import SuspectCheckpoints

    doubt = SuspectCheckpoints(tiers.nearest_first).about(manifest)
    return [f"{manifest.name}: {doubt}"] if doubt is not None else []


def url_of(url: str | None, run_dir: Path | None) -> str:
    """Return where checkpoints are: ``url``, or what a run says."""
    if url is not None:
        return url
    from craft.settings.run import read_effective
    from craft.settings.rundir import find_run
    from craft.telemetry.records.journal_reader import read_journal

    run = find_run(run_dir)
    given = read_effective(run.config)
    if given.get("checkpoints"):
        return str(given["checkpoints"])
    # The script may have set it: then the events of written checkpoints name it.
    lines = read_journal(run.journal)
    urls = [str(line["url"]) for line in lines if line.get("event") == "CheckpointWritten"]
    if not urls:
        raise ConfigError(f"the run in {run.path} has written no checkpoints: give their URL")
    return urls[-1]


def url_and_name(words: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Distinguish a URL from the step or name of a checkpoint; each may be missing."""
    from craft.snapshots.checkpoint.catalog import names_one

    if len(words) > 2:
        raise click.UsageError(f"{len(words)} words where a URL and a step or name are expected: {' '.join(words)}")
    if len(words) == 1 and names_one(words[0]):
        return None, words[0]
    return (words[0] if words else None), (words[1] if len(words) == 2 else None)


def listed(url: str) -> tuple[Tiers, list[Manifest], list[str]]:
    """Return the store at a URL, its manifests, newest first, and sentences about unreadable ones."""
    from craft.snapshots.checkpoint.catalog import candidates, select
    from craft.snapshots.store.tiers import open_tiers

    tiers = open_tiers(url)
    unreadable: list[str] = []
    found = candidates(tiers, lambda event: unreadable.append(event.reason))
    if not found and not unreadable:
        select(found, tiers.url)
    return tiers, found, unreadable


def check_not_empty(store: Store) -> None:
    from craft.snapshots.checkpoint.catalog import select
    from craft.snapshots.store.manifest import CHUNKS, MANIFESTS, PARTS

    # Before anything is locked there: a mistyped URL must not become a store.
    if not any(store.files(folder) for folder in (MANIFESTS, PARTS, CHUNKS)):
        select((), store.url)


@contextmanager
def reading(total_bytes: int, quiet: bool) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """Yield functions that report read bytes, and print lines; on a terminal lines wait until the bar is gone."""
    if quiet or not sys.stderr.isatty():
        yield (lambda _: None), (lambda line: None if quiet else echo(line))
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    lines: list[str] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=total_bytes)
        yield (lambda count: bar.advance(task, count)), lines.append
    for line in lines:
        echo(line)
