"""Check that adapted packages are installed in versions whose loops and messages CRAFT knows."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import NamedTuple

from craft.protocol.errors import ConfigError

TORCHFT = ("torchft-nightly", "torchft")
"""The names under which it is distributed."""


class _Known(NamedTuple):
    extra: str
    """The extra of CRAFT that installs it."""
    oldest: tuple[int, int]
    following: tuple[int, int]
    """The first version that is too new."""
    versions: str
    """The same for people."""


_LIGHTNING = _Known("lightning", (2, 4), (3, 0), "Lightning from 2.4 on, below 3.0")
_TORCHFT = _Known("torchft", (2026, 10), (2027, 1), "the nightly builds from 2026.10 on, before 2027.1")
_KNOWN = {
    "lightning.pytorch": _LIGHTNING,
    "pytorch_lightning": _LIGHTNING,
    "transformers": _Known("huggingface", (5, 22), (6, 0), "versions from 5.22 on, below 6.0"),
    "accelerate": _Known("huggingface", (1, 15), (2, 0), "versions from 1.15 on, below 2.0"),
    "torchft-nightly": _TORCHFT,
    "torchft": _TORCHFT,
    "nvidia-resiliency-ext": _Known("nvrx", (0, 4), (0, 5), "0.4.x"),
}


def check(*packages: str) -> None:
    """Raise ConfigError unless all are installed in known versions."""
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"{package} is not installed: {_hint(package)}") from None
        check_version(package, version)


def check_torchft() -> None:
    """Raise ConfigError unless torchft and gRPC are installed."""
    installed = [name for name in TORCHFT if any(importlib.metadata.distributions(name=name))]
    check(installed[0] if installed else "torchft")
    if importlib.util.find_spec("grpc") is None:
        hint = _hint("torchft")
        raise ConfigError(f"grpcio is not installed, through which torchft's lighthouse hears of losses: {hint}")


def check_version(package: str, version: str) -> None:
    """Raise ConfigError unless CRAFT knows this version, by its first two numbers."""
    known = _KNOWN[package]
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        number = ()
    if not known.oldest <= number < known.following:
        hint = _hint(package)
        raise ConfigError(f"{package} {version} is installed, and CRAFT works with {known.versions}: {hint}")


def _hint(package: str) -> str:
    return f"pip install 'craft[{_KNOWN[package].extra}]'"
