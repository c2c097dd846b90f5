"""Lines of ``metrics.jsonl``, each with a checksum, so that a damaged line is left out instead of misread.

The leader of a job writes them (``worker/report/step_log.py``). A job that begins again compares its steps with them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from craft.settings.files.sealed import Damaged, is_sealed, seal
from craft.telemetry.records.journal import parsed
from craft.telemetry.records.journal_reader import warn_of_damage

logger = logging.getLogger(__name__)

CHECKSUM = "checksum"


def encode(values: Mapping[str, Any]) -> bytes:
    """Return the line of a step, without its end. A metric that is not finite is null: JSON has no NaN."""
    return seal(msgspec.json.encode(values))


def decoded(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the content of each line, without its checksum; None for a damaged one."""
    checksums = False
    for line in lines:
        found, sealed = _decode(line)
        if sealed or not checksums:
            yield found
        else:
            # Earlier versions wrote no checksums. After a line with one all lines have one: this line has lost its checksum.
            yield None
        checksums = checksums or sealed


def _decode(line: bytes) -> tuple[dict[str, Any] | None, bool]:
    """Return the content of a line (None if damaged), and whether it has a valid checksum."""
    try:
        sealed = is_sealed(line)
    except Damaged:
        return None, False
    found = next(parsed([line]), None)
    if found is None or not _is_count(found.get("step")) or not _is_count(found.get("branch", 0)):
        return None, sealed
    return {name: value for name, value in found.items() if name != CHECKSUM}, sealed


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of the lines of a ``metrics.jsonl``; damaged ones are left out, with one warning for all."""
    damaged = 0
    try:
        with path.open("rb") as file:
            # The last line may still be under way.
            for found in decoded(line for line in file if line.endswith(b"\n")):
                if found is not None:
                    yield found
                else:
                    damaged += 1
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be read to its end: %s", path, error.strerror or error)
    warn_of_damage(path, damaged)
