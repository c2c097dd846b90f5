"""Write and read ``config.toml`` of a run directory, with a checksum and a spare copy for restarted lighthouses."""

from __future__ import annotations

import logging
from pathlib import Path

from craft.protocol.errors import ConfigError
from craft.settings.files.private_files import read_private, write_private
from craft.settings.files.sealed import Damaged, is_sealed_toml, seal_toml

logger = logging.getLogger(__name__)


def write_sealed(path: Path, text: str) -> None:
    """Write the effective settings and their spare copy."""
    for each in (path, spare_of(path)):
        try:
            write_private(each, seal_toml(text))
        except OSError as error:
            raise ConfigError(f"cannot write {each}: {error.strerror}") from None


def spare_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.spare")


def undamaged(path: Path) -> Path:
    """Return the file to read: ``path``, or its spare copy if it is damaged. Raise ConfigError if both are."""
    spare = spare_of(path)
    # Earlier versions wrote neither a checksum nor a spare copy.
    if _is_good(path) or not spare.exists():
        return path
    if not _is_good(spare):
        raise ConfigError(
            f"{path} and its spare copy {spare.name} are damaged: their checksums do not fit. Put a good copy of one of them in"
            " its place, or start a new run in another directory: with --resume it goes on from the newest checkpoint"
        )
    logger.warning("%s is damaged, or was changed by hand: the lighthouse reads its spare copy, %s", path, spare.name)
    return spare


def _is_good(path: Path) -> bool:
    try:
        return is_sealed_toml(read_private(path))
    except (OSError, Damaged):
        return False
