"""What simulated workers send each other: as in ``tests/model``, a member's whole contribution travels as one ``Share``."""

from __future__ import annotations

from typing import NamedTuple

from craft.protocol.membership import Claim


class Claimed(NamedTuple):
    """A member's claim for the generation of the group."""

    claim: Claim


class Share(NamedTuple):
    """A member's whole contribution to a step: the sums of what it holds, and its word."""

    branch: int
    step: int
    owners: tuple[int, ...]
    ready: int
    """The upcoming generation that it is ready for."""
    able: bool
    ends: bool
    """Whether it was told that the loop is to end here."""
    makes_room: bool
    saves: bool
    """Whether it wants a checkpoint at this step boundary."""


class Ack(NamedTuple):
    """Its sender has the whole result of the step."""

    branch: int
    step: int


class Wrote(NamedTuple):
    """Its sender has written its part of a checkpoint."""

    branch: int
    step: int


class Done(NamedTuple):
    """Its sender has come to the end of the loop."""

    step: int


Message = Claimed | Share | Ack | Wrote | Done
