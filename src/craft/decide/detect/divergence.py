"""The answers to numbers that are not finite."""

from __future__ import annotations

from typing import Literal

DivergenceAnswer = Literal["report", "skip", "lower-lr", "rollback", "stop"]
"""``report``: log it and go on. ``skip``: the step changes nothing. ``lower-lr``: it changes nothing, and the next ones less.
``rollback``: go back to the newest checkpoint and skip the data since. ``stop``: end the job."""
