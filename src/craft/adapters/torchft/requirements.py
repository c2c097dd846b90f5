"""Check that torchft, in a version that CRAFT knows, and gRPC are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from craft.adapters.package_versions import dotted, is_between
from craft.protocol.errors import ConfigError

DISTRIBUTIONS = ("torchft-nightly", "torchft")
_OLDEST, _NEXT = (2026, 10), (2027, 1)
_HINT = "pip install 'craft[torchft]'"


def check() -> None:
    """Raise ConfigError unless everything is installed."""
    found = [name for name in DISTRIBUTIONS if _version(name) is not None]
    if not found:
        raise ConfigError(f"torchft is not installed: {_HINT}")
    check_version(found[0], str(_version(found[0])))
    if importlib.util.find_spec("grpc") is None:
        raise ConfigError(f"grpcio is not installed, through which torchft's lighthouse hears of losses: {_HINT}")


def check_version(name: str, version: str) -> None:
    """Raise ConfigError unless CRAFT knows the manager and lighthouse of this version."""
    if not is_between(version, _OLDEST, _NEXT):
        raise ConfigError(
            f"{name} {version} is installed, and CRAFT works with the nightly builds from {dotted(_OLDEST)} on, before"
            f" {dotted(_NEXT)}: {_HINT}"
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
