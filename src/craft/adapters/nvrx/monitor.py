"""NVRx's monitor of a rank, which also reports to the lighthouse: missed heartbeats, endless sections, bad devices.

``launcher`` replaces NVRx's monitor by it for all ranks of an ``ft_launcher``; ``heartbeats`` starts one beside a worker of
``craft run``, where the lighthouse decides what follows.
"""

from __future__ import annotations

import time
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import rank_monitor_server
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer

from craft.adapters.nvrx.cloud_events import EventSender


class TellingMonitor(RankMonitorServer):
    """Reports once each process that it gives up."""

    teller: EventSender
    worker_id: str | None = None
    """The worker of this monitor, under ``craft run``."""
    _told: int | None = None

    async def _handle_timeout(self) -> None:
        self._tell("heartbeat-missed", self._overdue())
        await self._give_up(super()._handle_timeout)

    async def _handle_unhealthy_node(self) -> None:
        self._tell("node-unhealthy", "a GPU of this host needs to be reset")
        await self._give_up(super()._handle_unhealthy_node)

    async def _handle_unhealthy_nic(self) -> None:
        self._tell("nic-unhealthy", "a network link of this rank went down")
        await self._give_up(super()._handle_unhealthy_nic)

    async def _give_up(self, end: Any) -> None:
        # Under craft run the agent ends the worker, once the lighthouse has decided that it is lost.
        if self.worker_id is None:
            await end()

    def _overdue(self) -> str:
        now = time.monotonic()
        if self.open_sections:
            section, since = min(self.open_sections.items(), key=lambda each: each[1])
            return f"section {section} is open for {now - since:.1f} s"
        since = self.last_hb_time or self.start_time
        return f"no heartbeat for {now - since:.1f} s"

    def _tell(self, what: str, detail: str) -> None:
        if self.rank_info is None or self._told == self.rank_info.pid:
            return
        self._told = self.rank_info.pid
        info = self.rank_info
        whom: dict[str, str | int] = {"host": info.host, "local_rank": info.local_rank}
        if self.worker_id is not None:
            whom = {"worker_id": self.worker_id, "craft_answer": "fail"}
        self.teller.tell(what, rank=int(info.global_rank), pid=info.pid, message=detail, **whom)


def take_over(teller: EventSender, worker_id: str | None = None) -> None:
    """Make monitors that are started from now on, in processes forked from this one, report to the lighthouse."""
    TellingMonitor.teller = teller
    TellingMonitor.worker_id = worker_id
    # Looked up by name in the process that it starts.
    rank_monitor_server.RankMonitorServer = TellingMonitor
