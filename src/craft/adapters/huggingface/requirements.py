"""Check that transformers and accelerate are installed in versions whose loop CRAFT knows."""

from __future__ import annotations

import importlib.metadata

from craft.adapters.package_versions import dotted, is_between
from craft.protocol.errors import ConfigError

_KNOWN = {"transformers": ((5, 22), (6, 0)), "accelerate": ((1, 15), (2, 0))}
"""By package: the oldest version, and the first that is too new."""
_INSTALL = "pip install 'craft[huggingface]'"


def check() -> None:
    """Raise ConfigError unless both are installed in known versions."""
    for package in _KNOWN:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"{package} is not installed: {_INSTALL}") from None
        check_version(package, version)


def check_version(package: str, version: str) -> None:
    """Raise ConfigError unless CRAFT knows the loop of this version."""
    oldest, following = _KNOWN[package]
    if not is_between(version, oldest, following):
        raise ConfigError(
            f"{package} {version} is installed, and CRAFT works with versions from {dotted(oldest)} on, below"
            f" {dotted(following)}: {_INSTALL}"
        )
