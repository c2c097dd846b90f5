"""What the driver says of one GPU."""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    """Its name and UUID."""
    xids: tuple[int, ...] = ()
    """NVIDIA's numbers of the errors that came since the last reading."""
    uncorrected: int | None = None
    """ECC errors that could not be corrected, since the driver was loaded; None: the device does not count them."""
    hot: tuple[str, ...] = ()
    """Why clocks are held down because of heat; empty: they are not."""
    temperature_c: int | None = None
    lost: str | None = None
    """What the driver says where the device does not answer any more."""
