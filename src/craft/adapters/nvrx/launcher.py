"""``ft_launcher`` that reports to a lighthouse: ``python -m craft.adapters.nvrx.launcher --dir RUN ...``.

The arguments after ``--dir RUN`` are the launcher's, and it works as NVRx's. It reports missed heartbeats and other findings of
its monitors at once, and how its workers ended.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from craft.adapters.nvrx.cloud_events import EventSender
from craft.adapters.requirements import check
from craft.settings.rundir import find_run

_EVENTS = "torchelastic-events-null"
"""Name of the launcher's event logger."""
_LAST_WORDS_S = 5.0


class LauncherEvents(logging.Handler):
    """Receives how the launcher's workers ended."""

    def __init__(self, teller: EventSender) -> None:
        super().__init__()
        self._teller = teller

    def emit(self, record: logging.LogRecord) -> None:
        event = json.loads(record.getMessage())
        found = event["metadata"]
        if found.get("state") != "FAILED":
            return
        details = {"host": found["hostname"], "message": found["raw_error"] or "it failed"}
        if found["global_rank"] is not None:
            details["rank"] = found["global_rank"]
        what = "rank-failed" if event["source"] == "WORKER" else "launcher-failed"
        # The launcher may be about to end.
        self._teller.tell(what, **details).join(_LAST_WORDS_S)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m craft.adapters.nvrx.launcher",
        usage="%(prog)s --dir RUN [arguments of ft_launcher]",
        description="ft_launcher that reports its findings to a lighthouse.",
    )
    parser.add_argument("--dir", type=Path, required=True, help="run directory of the lighthouse")
    # Only the beginning is ours: the launched script may have a --dir, too.
    own, rest = parser.parse_args(arguments[:2]), arguments[2:]
    check("nvidia-resiliency-ext")
    from nvidia_resiliency_ext.fault_tolerance import launcher

    from craft.adapters.nvrx.monitor import take_over

    teller = EventSender(find_run(own.dir))
    take_over(teller)
    logging.getLogger(_EVENTS).addHandler(LauncherEvents(teller))
    launcher.main(rest)


if __name__ == "__main__":
    main()
