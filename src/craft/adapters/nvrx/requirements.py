"""Check that nvidia-resiliency-ext is installed in a version whose plug-ins and store CRAFT knows."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from craft.protocol.errors import ConfigError

_NAME = "nvidia-resiliency-ext"
_KNOWN = "0.4."


def check() -> None:
    """Raise ConfigError unless it is."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise ConfigError(f"{_NAME} is not installed: pip install 'craft[nvrx]'")
    check_version(importlib.metadata.version(_NAME))


def check_version(version: str) -> None:
    """Raise ConfigError unless this is a version that CRAFT knows."""
    if not version.startswith(_KNOWN):
        raise ConfigError(f"{_NAME} {version} is installed, and CRAFT works with {_KNOWN}x: pip install 'craft[nvrx]'")
