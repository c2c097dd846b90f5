"""Messages between a donor and its clients: one request and its answer per TCP connection.

Both ends prove to have the job's key, and everything is sealed (``craft.wire.peers``). A stripe is sent in frames, over one
connection or several. ``donor.py`` and ``fetch.py`` are the two ends.
"""

from __future__ import annotations

import msgspec

from craft.wire.peers import PeerRefusal

MAX_LANES = 64
LARGE_FRAME_BYTES = 4 << 20
"""For states on devices, which are large and arrive faster than Python could handle small frames."""


class StripeOf(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for stripe ``part`` of ``of`` of the state staged under ``name``, or for one lane of it."""

    name: str
    part: int
    of: int
    nonce: bytes
    lane: int = 0
    lanes: int = 1
    """Every ``lanes``-th frame of the stripe, from number ``lane`` on: the others use other connections."""


class ResultOf(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Asks for a result that is remembered under ``name``."""

    name: str
    nonce: bytes


class Stripe(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to ``StripeOf``. The header follows, then the frames that were asked for."""

    name: str
    level: int
    header_bytes: int
    stripe_bytes: int
    frame_bytes: int


class Result(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The answer to ``ResultOf``. The result follows in frames."""

    size: int


Request = StripeOf | ResultOf
Answer = Stripe | Result | PeerRefusal


def lane_of(size: int, frame_bytes: int, lane: int, lanes: int) -> range:
    """Return where the frames of ``size`` bytes begin that go over this lane."""
    return range(lane * frame_bytes, size, lanes * frame_bytes)
