"""Read the journal with every line checked: readers only see valid records.

In: ``journal.jsonl``. Out: records with every field of their type. The lighthouse moves damaged lines to a file beside the
journal when it starts; commands that read a journal leave them out.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from craft.protocol.journal import RECORDS
from craft.settings.files.private_files import open_private
from craft.telemetry.records.journal import parsed, read_lines
from craft.telemetry.records.jsonl_file import append_to

logger = logging.getLogger(__name__)

_LATEST = 1e11
_SHOWN = 200
_MADE = frozenset({"Reconfigure", "Propose"})
"""Actions whose lines name the generation that they made."""


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal; damaged lines are left out, with one warning for all."""
    damaged = 0
    for line in read_lines(path):
        record = as_record(line)
        if record is not None:
            yield record
        else:
            damaged += 1
    warn_of_damage(path, damaged)


def warn_of_damage(path: Path, lines: int) -> None:
    """Log how many lines of a file are left out, if any."""
    if lines:
        logger.warning("%s: %d line%s damaged and left out", path, lines, " is" if lines == 1 else "s are")


def as_record(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line with all fields of its type; None if no lighthouse can have written it.

    An unknown name is accepted: a newer version may have written it.
    """
    kind, moment = line.get("kind"), line.get("time")
    if kind not in RECORDS or isinstance(moment, bool) or not isinstance(moment, int | float):
        return None
    name = line.get(kind)
    if not math.isfinite(moment) or not 0 <= moment < _LATEST or not isinstance(name, str):
        return None
    if name in _MADE and type(line.get("generation")) is not int:
        return None
    found = RECORDS[kind].get(name)
    if found is None:
        return line
    try:
        # A line has its own time beside that of the event.
        value = msgspec.convert({**line, "time": line.get("seen", moment)}, found, str_keys=True)
    except (msgspec.ValidationError, RecursionError):
        return None
    fields = _with_lists(msgspec.to_builtins(value))
    if "time" in fields:
        fields["seen"] = fields.pop("time")
    return {**line, **fields}


def _with_lists(value: Any) -> Any:
    """Return the value with lists instead of tuples, as in JSON."""
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, list | tuple) else value


def quarantine(path: Path) -> int:
    """Move damaged lines of a journal to a file beside it; return their number. Only its writer may call it.

    Spaces replace them in the journal, so that all other lines keep their positions.
    """
    if not path.exists():
        return 0
    damaged = list(_damaged(path))
    if not damaged:
        return 0
    _keep(damaged_file(path), [line for _, line in damaged])
    file = open_private(path, os.O_WRONLY)
    try:
        for offset, line in damaged:
            _blank(file, offset, len(line) - 1)
    except OSError as error:
        # The system's error does not name the file.
        error.filename = str(path)
        raise
    else:
        _sync(file, path)
    finally:
        os.close(file)
    return len(damaged)


def _blank(file: int, offset: int, size: int) -> None:
    while size:
        written = os.pwrite(file, b" " * size, offset)
        offset, size = offset + written, size - written


def _sync(file: int, path: Path) -> None:
    """Make it durable if the disk can: after a power cut the lines would be moved once more."""
    try:
        os.fsync(file)
    except OSError as error:
        logger.warning("%s cannot be synced: %s", path, error.strerror or error)


def damaged_file(path: Path) -> Path:
    """Return the file for damaged lines of a journal."""
    return path.with_name(f"{path.name}.damaged")


def _damaged(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield position and bytes of invalid lines, except of a last one that is still incomplete."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip() and not any(map(as_record, parsed([line]))):
                yield offset, line
            offset += len(line)


def _keep(target: Path, lines: list[bytes]) -> None:
    try:
        file = append_to(target)
        try:
            data = b"".join(lines)
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        # A full disk must not keep a lighthouse from starting.
        shown = "; ".join(repr(line[:_SHOWN]) for line in lines[:8])
        logger.warning("damaged lines cannot be kept in %s (%s): %s", target, error.strerror or error, shown)
