"""What an agent sees of a simulated worker: the kernel's view of its process, and what it says that it is doing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from craft.agent.linux.procfs import ProcessGlance
from craft.protocol.values.activity import Doing

from .machine import Machine

if TYPE_CHECKING:
    from .world import World


class Seen:
    """The kernel's view of a simulated process, in the place of its files in /proc."""

    def __init__(self, machine: Machine, pid: int) -> None:
        self._machine = machine
        self._pid = pid

    def glance(self) -> ProcessGlance | None:
        state = self._machine.state_of(self._pid)
        return ProcessGlance(state, 0.0, 0.0, 1) if state else None

    def close(self) -> None:
        """Nothing is open."""


class Activity:
    """What a simulated worker says that it is doing, in the place of its file in memory."""

    def __init__(self, world: World, path: Path) -> None:
        self._world = world
        self._worker_id = path.stem

    def read(self) -> Doing | None:
        worker = self._world.workers.get(self._worker_id)
        return worker.doing if worker is not None else None

    def close(self) -> None:
        """Nothing is open."""
