"""``craft checkpoints``: list, verify, compare, remove and export a job's checkpoints.

All but ``export`` work without torch. ``tables.py`` formats the output.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from craft.cli.checkpoints.targets import (
    check_not_empty,
    doubts_about,
    listed,
    reading,
    to_export,
    url_and_name,
    url_of,
)
from craft.cli.output.command_errors import EXIT_PROBLEM, explained_as_problem
from craft.cli.output.echo import echo, echo_json
from craft.cli.output.options import json_option, run_option

if TYPE_CHECKING:
    from craft.snapshots.checkpoint.gc import Collected
    from craft.snapshots.interop.export import Form

_ALL = 1 << 62
_MAX_REMOVED = 5
"""How many checkpoints may be removed while one is read to export it."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def checkpoints() -> None:
    """List, verify, compare, export and remove checkpoints.

    URL is where they are: a directory, or such as s3://bucket/job. Without it, that of the newest run in this directory.
    Name one by its step, its name or its tag; the default is the newest.

    \b
    Example:
      craft checkpoints ls
      craft checkpoints verify s3://bucket/job
      craft checkpoints export checkpoints 1200 --format safetensors model.safetensors
    """


@checkpoints.command()
@click.argument("url", required=False)
@run_option
@json_option("Print one JSON value.")
@explained_as_problem
def ls(url: str | None, run_dir: Path | None, as_json: bool) -> None:
    """List the checkpoints in URL, the newest first.

    \b
    Example:
      craft checkpoints ls
      craft checkpoints ls s3://bucket/job --json
    """
    from craft.cli.checkpoints.tables import as_record, listing
    from craft.snapshots.checkpoint.suspect import SuspectCheckpoints

    tiers, found, unreadable = listed(url_of(url, run_dir))
    doubts = SuspectCheckpoints(tiers.nearest_first)
    if as_json:
        echo_json([as_record(manifest, doubts) for manifest in found])
    else:
        echo(f"{len(found)} checkpoint{'s' * (len(found) != 1)} in {tiers.url}")
        for line in listing(found, doubts, time.time()):
            echo(line)
    for problem in unreadable:
        echo(f"craft: {problem}", err=True)


@checkpoints.command()
@click.argument("words", nargs=-1, metavar="[URL] [STEP|NAME]")
@run_option
@json_option("Print one JSON value.")
@explained_as_problem
def verify(words: tuple[str, ...], run_dir: Path | None, as_json: bool) -> None:
    """Read every byte of a checkpoint, or of all in URL, and report what is damaged or missing.

    The exit code is 1 if anything is.

    \b
    Example:
      craft checkpoints verify
      craft checkpoints verify checkpoints 1200
    """
    from craft.snapshots.checkpoint.catalog import is_listed, select
    from craft.snapshots.checkpoint.verify import verify as look
    from craft.telemetry.explain.amounts import size

    url, which = url_and_name(words)
    tiers, found, unreadable = listed(url_of(url, run_dir))
    chosen = found if which is None else [select(found, tiers.url, which)]
    problems, removed = list(unreadable) if which is None else [], []
    with reading(sum(manifest.total_bytes for manifest in chosen), quiet=as_json) as (advance, say):
        for problem in problems:
            say(problem)
        for manifest in chosen:
            wrong = look(tiers, manifest, advance) + doubts_about(tiers, manifest)
            if wrong and not is_listed(tiers, manifest.name):
                say(f"{manifest.name} was removed meanwhile: the job that writes there keeps only its newest ones")
                removed.append(manifest.name)
                continue
            problems += wrong
            for line in wrong or [f"{manifest.name}: all {size(manifest.total_bytes)} are as they were written"]:
                say(line)
    if as_json:
        counted = {"url": tiers.url, "verified": len(chosen) - len(removed)}
        echo_json({**counted, "problems": problems, "removed": removed})
    raise SystemExit(EXIT_PROBLEM if problems or len(removed) == len(chosen) else 0)


@checkpoints.command()
@click.argument("url", required=False)
@run_option
@click.option(
    "--keep", type=click.IntRange(min=1), help="Keep so many without a tag, and all that have one.  [default: all]"
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option("Print one JSON value.")
@explained_as_problem
def gc(url: str | None, run_dir: Path | None, keep: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints from URL, and bytes that no checkpoint needs.

    Refuses while a job writes there; jobs remove old ones themselves.

    \b
    Example:
      craft checkpoints gc checkpoints --keep 3 --dry-run
    """
    from craft.snapshots.checkpoint.gc import collect
    from craft.snapshots.store.tiers import open_store

    store = open_store(url_of(url, run_dir))
    check_not_empty(store)
    found = collect(store, keep or _ALL, time.time(), dry_run)
    _say_removed(store.url, found, dry_run, as_json)


@checkpoints.command()
@click.argument("words", nargs=-1, metavar="[URL] STEP|NAME|TAG...")
@run_option
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option("Print one JSON value.")
@explained_as_problem
def rm(words: tuple[str, ...], run_dir: Path | None, dry_run: bool, as_json: bool) -> None:
    """Remove the named checkpoints, also those with a tag, and bytes that no other one needs.

    A step or a tag means all that have it. It does not ask. It refuses while a job writes there. With --dir, or if the first
    word is a step or a name, there is no URL among the words.

    \b
    Example:
      craft checkpoints rm checkpoints 1200 before-the-lr-drop
    """
    from craft.snapshots.checkpoint.catalog import names_one, select_all
    from craft.snapshots.checkpoint.gc import collect
    from craft.snapshots.store.tiers import open_store

    has_url = run_dir is None and bool(words) and not names_one(words[0])
    which = words[1:] if has_url else words
    if not which:
        raise click.UsageError("say which ones: their steps, names or tags, and their URL before them")
    url = url_of(words[0] if has_url else None, run_dir)
    tiers, manifests, _ = listed(url)
    unwanted = {manifest.name for manifest in select_all(manifests, tiers.url, which)}
    _say_removed(url, collect(open_store(url), _ALL, time.time(), dry_run, unwanted), dry_run, as_json)


def _say_removed(url: str, found: Collected, dry_run: bool, as_json: bool) -> None:
    from craft.telemetry.explain.amounts import size

    if as_json:
        echo_json({"url": url, "dry_run": dry_run, **found._asdict()})
        return
    verb = "would be removed" if dry_run else "removed"
    for name in found.manifests:
        echo(f"checkpoint {name} {verb}")
    for path in found.parts:
        echo(f"{path}, of a checkpoint that was never complete, {verb}")
    echo(f"{len(found.chunks)} chunk{'s' * (len(found.chunks) != 1)} {verb}, {size(found.freed_bytes)}")


@checkpoints.command()
@click.argument("words", nargs=-1, metavar="[URL] A B")
@run_option
@json_option("Print one JSON value.")
@explained_as_problem
def diff(words: tuple[str, ...], run_dir: Path | None, as_json: bool) -> None:
    """Show in which tensors checkpoints A and B differ, and how many bytes are stored once for both.

    \b
    Example:
      craft checkpoints diff checkpoints 1000 1200
    """
    from craft.cli.checkpoints.tables import differences, differences_record
    from craft.snapshots.checkpoint.catalog import select
    from craft.snapshots.checkpoint.verify import diff as compare

    if len(words) not in (2, 3):
        raise click.UsageError("name two checkpoints, by their steps or names, and perhaps their URL before them")
    tiers, found, _ = listed(url_of(words[0] if len(words) == 3 else None, run_dir))
    before, after = (select(found, tiers.url, which) for which in words[-2:])
    found_difference = compare(tiers, before, after)
    if as_json:
        echo_json(differences_record(before, after, found_difference))
        return
    for line in differences(before, after, found_difference):
        echo(line)


@checkpoints.command()
@click.argument("words", nargs=-1, metavar="[URL] [STEP|NAME]")
@click.argument("out", type=click.Path(path_type=Path))
@run_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    required=True,
    help="safetensors: the modules' tensors. torch: one file for torch.load. dcp: a directory for torch.distributed.checkpoint.",
)
@explained_as_problem
def export(words: tuple[str, ...], out: Path, run_dir: Path | None, form: Form) -> None:
    """Write a checkpoint to OUT in a format that other programs read; every byte is verified.

    torch and dcp hold {"model": its state_dict, "registered": {name: state_dict}, "step": ..., "branch": ...}.

    \b
    Example:
      craft checkpoints export --format safetensors model.safetensors
      craft checkpoints export s3://bucket/job best --format torch best.pt
    """
    from craft.protocol.errors import SnapshotError
    from craft.snapshots.checkpoint.catalog import is_listed

    url, which = url_and_name(words)
    place = url_of(url, run_dir)
    for is_last in (False,) * _MAX_REMOVED + (True,):
        tiers, manifest = to_export(place, which)
        # Imported late: torch takes a while, and bad input gets its answer at once.
        from craft.snapshots.interop.export import export as write

        try:
            with reading(manifest.total_bytes, quiet=False) as (advance, say):
                write(tiers, manifest, form, out, advance)
                say(f"{out} holds checkpoint {manifest.name}")
            return
        except SnapshotError:
            if is_last or is_listed(tiers, manifest.name):
                raise
            echo(f"craft: {manifest.name} was removed while it was read, by the job that writes there", err=True)
