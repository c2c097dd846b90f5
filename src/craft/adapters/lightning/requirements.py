"""The two packages that Lightning comes as, each with its own classes: find the one in use and check its version."""

from __future__ import annotations

import importlib.util
import sys

from craft.adapters.package_versions import dotted, is_between
from craft.protocol.errors import ConfigError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_OLDEST, _NEXT = (2, 4), (3, 0)


def imported() -> str:
    """Return the package that the script has imported, or else the installed one."""
    for package in PACKAGES:
        if package in sys.modules:
            return package
    for package in PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ConfigError("neither lightning nor pytorch_lightning is installed: pip install 'craft[lightning]'")


def check_version(package: str, version: str) -> None:
    """Raise ConfigError unless CRAFT knows the loops of this version."""
    if not is_between(version, _OLDEST, _NEXT):
        raise ConfigError(
            f"{package} {version} is installed, and CRAFT works with Lightning from {dotted(_OLDEST)} on, below"
            f" {dotted(_NEXT)}: pip install 'craft[lightning]'"
        )
