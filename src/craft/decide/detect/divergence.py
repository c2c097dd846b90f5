"""What is done about numbers that are not finite."""

from __future__ import annotations

from typing import Literal

DivergenceAnswer = Literal["report", "skip", "lower-lr", "rollback", "stop"]
"""``report``: say so and go on. ``skip``: the step changes nothing. ``lower-lr``: it changes nothing, and the next ones less.
``rollback``: go back to the newest checkpoint and leave out the data since. ``stop``: end the job."""
