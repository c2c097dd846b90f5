"""A reporter that keeps what it is told: for tests of what goes into the journal."""

from __future__ import annotations

from craft.protocol.events import AnyNote, Event
from craft.worker.membership.client import MembershipClient
from craft.worker.report.reporter import Reporter


class Noting(Reporter):
    def __init__(self, worker_id: str, membership: MembershipClient) -> None:
        self.noted: list[AnyNote] = []
        self.emitted: list[Event] = []
        super().__init__(worker_id, membership, None, self.emitted.append)

    def note(self, event: AnyNote) -> None:
        self.noted.append(event)
