"""Store a ``Durable`` in a file that is replaced atomically, with a spare copy beside it.

``Lighthouse`` loads it at start; ``Loop`` saves before it sends a directive.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from craft.control.core.persistence import Durable
from craft.protocol.errors import ConfigError
from craft.settings.files.private_files import read_private, sync_folder, write_over, write_private
from craft.settings.files.sealed import Damaged, is_sealed, seal

logger = logging.getLogger(__name__)

_ROOM = 16 * 1024
_UNSEALED = "has lost its checksum"


class Copy(NamedTuple):
    """The content of one of the two files."""

    durable: Durable | None
    """None: the file is missing, or damaged."""
    sealed: bool = False
    problem: str = ""


class DurableFile:
    """One small file, replaced atomically, and a spare copy of it.

    Two files take turns: a record overwrites the one before the last, and is then renamed. So its disk space is already
    allocated: a full disk does not keep a job from going on without a lost worker, or from ending. The spare copy has the
    same record, never an older one: a lighthouse that restores from it has lost nothing.
    """

    def __init__(self, path: Path) -> None:
        self.problem = ""
        """What ``load`` found damaged, and what it did about it, in words."""
        self._path = path
        self._next = path.with_name(f".{path.name}.next")
        self._last = path.with_name(f".{path.name}.last")
        self._spare = path.with_name(f".{path.name}.spare")
        self._aside = path.with_name(f"{path.name}.damaged")

    def save(self, durable: Durable) -> None:
        data = seal(msgspec.json.encode(durable))
        # First, and in place: nothing is saved until the other file is renamed.
        write_over(self._spare, data.ljust(_room_for(self._spare, len(data))) + b"\n")
        self._replace(data)

    def _replace(self, data: bytes) -> None:
        write_over(self._next, data.ljust(_room_for(self._next, len(data))) + b"\n")
        # A second name for the replaced file keeps its disk space for the next record.
        self._last.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            # Not there yet, or a file system without hard links.
            os.link(self._path, self._last)
        os.replace(self._next, self._path)
        sync_folder(self._path)
        try:
            if self._last.exists():
                os.replace(self._last, self._next)
            else:
                write_over(self._next, b" " * self._path.stat().st_size)
        except OSError as error:
            # The record itself is saved.
            logger.warning("no disk space is reserved yet for the next durable generation: %s", error)

    def load(self) -> Durable | None:
        """Return the last record, or None without one; repair a damaged copy from the other one.

        Raises ConfigError if no copy can be read.
        """
        first, spare = _read(self._path), _read(self._spare)
        if not self._path.exists() and not self._spare.exists():
            return None
        # With a spare copy, both have checksums: one without is damaged.
        if first.durable is not None and (first.sealed or not spare.sealed):
            if not spare.sealed and self._spare.exists():
                problem = spare.problem or _UNSEALED
                self._repaired(f"{self._spare.name}, its spare copy, {problem}: it is written anew", first.durable)
            return first.durable
        if spare.durable is None and not self._path.exists() and not self._next.exists():
            self.problem = f"{self._spare.name} {spare.problem}: the first record was never whole, so nothing is lost"
            logger.warning("%s: %s", self._path.parent, self.problem)
            return None
        if spare.durable is None:
            raise ConfigError(
                f"cannot go on with the run in {self._path.parent}: {self._path.name} {first.problem}, and"
                f" {self._spare.name}, its spare copy, {spare.problem}. Put a good copy of one of the two in its place, or"
                " start a new run in another directory: with --resume it goes on from the newest checkpoint"
            )
        self._keep_damaged()
        problem = first.problem or _UNSEALED
        self._repaired(f"{self._path.name} {problem}: the lighthouse goes on from its spare copy", spare.durable)
        return spare.durable

    def _keep_damaged(self) -> None:
        """Keep the damaged file for inspection."""
        with contextlib.suppress(OSError):
            write_private(self._aside, read_private(self._path))

    def _repaired(self, problem: str, durable: Durable) -> None:
        self.problem = problem
        logger.warning("%s: %s", self._path.parent, problem)
        self.save(durable)


def _room_for(path: Path, size: int) -> int:
    """Return the size to reserve: the present one if it is enough, else enough for a while."""
    try:
        there = path.stat().st_size - 1
    except FileNotFoundError:
        there = _ROOM
    return there if there >= size else 2 * size


def _read(path: Path) -> Copy:
    try:
        return decode(read_private(path))
    except FileNotFoundError:
        return Copy(None, problem="is missing")
    except OSError as error:
        return Copy(None, problem=f"cannot be read ({error.strerror or error})")


def decode(data: bytes) -> Copy:
    """Parse the bytes of a file, or say what is wrong with them."""
    try:
        return Copy(msgspec.json.decode(data, type=Durable), is_sealed(data))
    except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as error:
        return Copy(None, problem=f"is damaged ({error})")
