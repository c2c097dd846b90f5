"""Read the journal of earlier lighthouses once, and fill every book that a new lighthouse begins with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from craft.control.replay.alert_book import AlertBook
from craft.control.replay.already_journaled import AlreadyJournaled
from craft.control.replay.checkpoints import CheckpointBook
from craft.control.replay.faults import FaultBook
from craft.protocol.events import TimesMeasured


class JournalReplay:
    """The books after the last line of the journal; some of them listen to the new lighthouse's lines, too."""

    def __init__(self, lines: Iterable[dict[str, Any]] = ()) -> None:
        self.checkpoints = CheckpointBook()
        self.alerts = AlertBook()
        self.faults = FaultBook()
        self.journaled = AlreadyJournaled()
        measured = None
        for line in lines:
            self.checkpoints(line)
            self.alerts(line)
            self.faults(line)
            self.journaled(line)
            if line.get("event") == "TimesMeasured":
                measured = line
        self.times = None if measured is None else msgspec.convert(measured, TimesMeasured, strict=False)
        """The last times that an earlier lighthouse measured."""
