"""A reading of one GPU from its driver."""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    """Its name and UUID."""
    xids: tuple[int, ...] = ()
    """NVIDIA's error numbers (XIDs) since the last reading."""
    uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded; None: the device does not count them."""
    hot: tuple[str, ...] = ()
    """Reasons of thermal clock throttling; empty: there is no throttling."""
    temperature_c: int | None = None
    lost: str | None = None
    """The driver's error if the device no longer answers."""
