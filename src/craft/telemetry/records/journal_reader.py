"""Read the journal back, line by line checked: what is not a whole record never reaches who works with it.

Enters: ``journal.jsonl``. Leaves: records with every field that their type has, and damaged lines in a file beside it. The
lighthouse sets damaged lines aside when it begins; commands that read a journal leave them out.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
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
"""Actions whose lines say which generation they made."""


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a journal; lines that are damaged are left out, with one warning for all."""
    return records(read_lines(path), lambda count: _warn(path, count))


def records(lines: Iterable[dict[str, Any]], left_out: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    """Yield lines that are whole records; ``left_out`` is told at the end how many are not, if any."""
    count = 0
    for line in lines:
        record = as_record(line)
        if record is not None:
            yield record
        else:
            count += 1
    if count:
        left_out(count)


def _warn(path: Path, count: int) -> None:
    logger.warning("%s: %d line%s damaged and left out", path, count, " is" if count == 1 else "s are")


def as_record(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line with all fields of its type; None if it is not what any lighthouse has written.

    A name that is not known here is accepted: it may be that of a newer version.
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
        # The journal has its own time beside that of an event.
        value = msgspec.convert({**line, "time": line.get("seen", moment)}, found, str_keys=True)
    except (msgspec.ValidationError, RecursionError):
        return None
    fields = _with_lists(msgspec.to_builtins(value))
    if "time" in fields:
        fields["seen"] = fields.pop("time")
    return {**line, **fields}


def _with_lists(value: Any) -> Any:
    """The value with lists in the place of tuples, as JSON has it."""
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, list | tuple) else value


def set_aside(path: Path) -> int:
    """Move damaged lines of a journal to a file beside it; return how many there were. Only its one writer may call it.

    In the journal spaces take their place: the numbers and positions of all other lines stay as readers know them.
    """
    if not path.exists():
        return 0
    damaged = list(_damaged(path))
    if not damaged:
        return 0
    aside = aside_of(path)
    _keep(aside, [line for _, line in damaged])
    file = open_private(path, os.O_WRONLY)
    try:
        for offset, line in damaged:
            _blank(file, offset, len(line) - 1)
    except OSError as error:
        # The system does not say of which file it is.
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
    """Make it durable, if the disk does so: after a power cut the lines would be set aside once more."""
    try:
        os.fsync(file)
    except OSError as error:
        logger.warning("%s cannot be synced: %s", path, error.strerror or error)


def aside_of(path: Path) -> Path:
    """Where damaged lines of a journal go."""
    return path.with_name(f"{path.name}.damaged")


def _damaged(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the position and the bytes of lines that are not records; one without its end is still to be ended."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip() and not any(map(as_record, parsed([line]))):
                yield offset, line
            offset += len(line)


def _keep(aside: Path, lines: list[bytes]) -> None:
    try:
        file = append_to(aside)
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
        logger.warning("damaged lines cannot be kept in %s (%s): %s", aside, error.strerror or error, shown)
