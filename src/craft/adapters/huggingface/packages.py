"""Whether transformers and accelerate are there, in versions whose loop is known here."""

from __future__ import annotations

import importlib.metadata

from craft.protocol.errors import ConfigError

_KNOWN = {"transformers": ((5, 22), (6, 0)), "accelerate": ((1, 15), (2, 0))}
"""By package: the oldest version, and the one that is too new."""
_INSTALL = "pip install 'craft[huggingface]'"


def check() -> None:
    """Raise ConfigError unless both are there in versions that are known."""
    for package in _KNOWN:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"{package} is not installed: {_INSTALL}") from None
        check_version(package, version)


def check_version(package: str, version: str) -> None:
    """Raise ConfigError unless this is a version whose loop is known here."""
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        number = (0, 0)
    oldest, following = _KNOWN[package]
    if not oldest <= number < following:
        raise ConfigError(
            f"{package} {version} is installed, and CRAFT works with versions from {_join(oldest)} on, below"
            f" {_join(following)}: {_INSTALL}"
        )


def _join(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
