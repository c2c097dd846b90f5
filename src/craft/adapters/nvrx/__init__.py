"""nvidia-resiliency-ext 0.4: plug-ins for its in-process wrapper, and its heartbeats as events. See docs/howto/nvrx.md."""

from __future__ import annotations

from craft.adapters.requirements import check

check("nvidia-resiliency-ext")

from craft.adapters.nvrx.attend import Attend  # noqa: E402  (the message about a missing package comes first)
from craft.adapters.nvrx.heartbeats import heartbeats  # noqa: E402
from craft.adapters.nvrx.plugins import AbortGloo, TellHealth  # noqa: E402

__all__ = ["AbortGloo", "Attend", "TellHealth", "heartbeats"]
