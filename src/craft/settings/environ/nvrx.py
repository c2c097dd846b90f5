"""The environment variable that ``ft_launcher`` of nvidia-resiliency-ext sets for its ranks."""

from __future__ import annotations

import os

MONITOR = "FT_RANK_MONITOR_IPC_SOCKET"


def is_monitored() -> bool:
    """Whether a monitor waits for this process's heartbeats."""
    return MONITOR in os.environ
