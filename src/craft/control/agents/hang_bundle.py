"""Inspect all workers when one hangs, and write a bundle to the run directory.

A listener of the journal. A finding is journaled before it is answered, so agents get the question before any
directive: workers dump their stacks as they were, and the job does not wait for the bundle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from craft.control.agents.inspection import Busy, Inspections, Unanswered
from craft.protocol.values.inspection import CloseUp
from craft.settings.rundir import RunDir
from craft.telemetry.explain import bundle
from craft.telemetry.explain.sentences import hangs

logger = logging.getLogger(__name__)

MAX_HOSTS = 32
"""Most hosts that are asked in a large job, the one of the hanging worker first."""
MAX_BUNDLES = 50
"""Most bundles of one lighthouse."""
_PAUSE_S = 2.0
"""Workers that hang for the same reason are found within moments of each other."""


class HangBundles:
    """Lives on the lighthouse's event loop."""

    def __init__(
        self,
        run: RunDir,
        inspections: Inspections,
        host_of: Callable[[str], str | None],
        hosts: Callable[[], Iterable[str]],
    ) -> None:
        self._run = run
        self._inspections = inspections
        self._host_of = host_of
        self._hosts = hosts
        self._last = -_PAUSE_S
        self._made = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, line: dict[str, Any]) -> None:
        """Take in a line of the journal."""
        if line.get("event") == "WorkerOverdue" and line["phase"] != "exchanging":
            self._begin(line["worker_id"], line["phase"], hangs(line))
        elif line.get("action") == "Probe":
            self._begin(None, "exchange", f"every worker waits: {line['reason']}")

    def _begin(self, worker_id: str | None, what: str, title: str) -> None:
        now = time.monotonic()
        if now - self._last < _PAUSE_S or self._made >= MAX_BUNDLES:
            return
        self._last, self._made = now, self._made + 1
        first = self._host_of(worker_id) if worker_id is not None else None
        hosts = sorted(set(self._hosts()), key=lambda host: (host != first, host))[:MAX_HOSTS]
        doing = self._inspections.doing()
        asked: dict[str, asyncio.Future[tuple[CloseUp, ...]] | str] = {}
        for host in hosts:
            try:
                asked[host] = self._inspections.ask(host, doing)
            except Unanswered as error:
                asked[host] = str(error)
            except Busy:
                asked[host] = f"host {host} was not asked: too many questions are open"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{bundle.safe(worker_id)}-{what}" if worker_id is not None else f"{stamp}-{what}"
        task = asyncio.create_task(self._collect(name, title, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _collect(
        self, name: str, title: str, asked: dict[str, asyncio.Future[tuple[CloseUp, ...]] | str]
    ) -> None:
        answers = [each for each in asked.values() if not isinstance(each, str)]
        if answers:
            await asyncio.wait(answers, timeout=self._inspections.limit_s)
        found: list[CloseUp] = []
        missing = []
        for host, answer in asked.items():
            if isinstance(answer, str):
                missing.append(answer)
            elif answer.done():
                found.extend(answer.result())
            else:
                answer.cancel()
                missing.append(f"the agent of host {host} did not answer within {self._inspections.limit_s:g} s")
        try:
            folder = await asyncio.to_thread(bundle.write, self._run.diagnosis / name, title, found, missing)
        except OSError as error:
            # Only a record: a full disk must not end the job.
            logger.error("cannot write the hang bundle: %s", error)
        else:
            logger.warning("%s: see %s", title, folder / "summary.txt")
