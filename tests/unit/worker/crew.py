"""Workers of one job as threads of this process: real groups and state transfer; the test is their lighthouse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from craft.groups.rendezvous import RendezvousStore
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Broken, Directive
from craft.settings.worker import WorkerSettings
from craft.snapshots.transfer.donor import Donor
from craft.worker.api.job import Job
from craft.worker.membership.client import MembershipClient
from craft.worker.report.activity_page import ActivityPage

from .alone import dataset, model
from .members import KEY, LIMIT_S

Script = Callable[["Worker"], None]


class Killed(Exception):
    """Ends a worker in the middle of its script."""


def wait_for(there: Callable[[], bool], what: str) -> None:
    """Return once ``there()``; fail after a while."""
    until = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < until, f"waited in vain: {what}"
        time.sleep(0.002)


class Worker(threading.Thread):
    """One worker: its script runs on this thread, which is its main thread."""

    def __init__(self, worker_id: str, script: Script, broken: list[Broken], **settings: Any) -> None:
        super().__init__(name=worker_id, daemon=True)
        self.worker_id = worker_id
        self.membership = MembershipClient(worker_id, "127.0.0.1", KEY, broken.append)
        self.donor = Donor("127.0.0.1", KEY)
        self.store = RendezvousStore("127.0.0.1", KEY)
        # Checks of the script hook into all optimizers of the process.
        given = WorkerSettings(worker_id=worker_id, state_key=KEY.hex(), check_script=False, **settings)
        self.job = Job(given, self.membership, None, ActivityPage(None), self.donor)
        # Here: the seed of a model is that of the whole process.
        self.net = self.job.replicate(model())
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.job.register(optimizer=self.optimizer)
        self.member = Member(
            worker_id=worker_id,
            store_port=self.store.port,
            state_port=self.donor.port,
            late=settings.get("late", False),
        )
        self.computed: list[tuple[int, int]] = []
        """(step, microbatch) that its script computed."""
        self.error: BaseException | None = None
        self._script = script

    def run(self) -> None:
        try:
            self._script(self)
        except BaseException as error:  # noqa: BLE001  (the edge of a thread: the test looks at it)
            self.error = error.with_traceback(None)
        # A process that ends closes its connections.
        self.membership.close()

    def close(self) -> None:
        """Leave no thread behind, as a process that ends does not; a killed worker has closed nothing itself."""
        if self.job._training is not None:
            self.job._training.close()
        self.donor.close()
        # In a process the store lasts until its end.
        self.store._server.close()

    @property
    def params(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.net.parameters()]


class Crew:
    """Gives directives to its workers, as a lighthouse does."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.broken: list[Broken] = []
        self._number = 0

    def add(self, worker_id: str, script: Script, **settings: Any) -> Worker:
        worker = self.workers[worker_id] = Worker(worker_id, script, self.broken, **settings)
        return worker

    def generation(self, *worker_ids: str) -> Generation:
        """The next generation; a late worker has been a member since it, and has no state."""
        self._number += 1
        members = tuple(
            replace(each.member, since=self._number if each.member.late else 0)
            for each in (self.workers[worker_id] for worker_id in worker_ids)
        )
        return Generation(number=self._number, nonce="crew", members=members)

    def direct(self, generation: Generation, upcoming: Generation | None = None) -> None:
        directive = Directive(sequence=self._number, slots=2, generation=generation, upcoming=upcoming)
        for worker in self.workers.values():
            worker.membership.direct(directive)

    def join(self) -> None:
        for worker in self.workers.values():
            worker.join(LIMIT_S)
            assert not worker.is_alive(), f"{worker.worker_id} is still blocked"
        for worker in self.workers.values():
            worker.close()


STEPS, BATCH, MICROBATCHES = 12, 8, 4


def train(worker: Worker, before: Callable[[int, int], None] = lambda *_: None, steps: int = STEPS) -> None:
    """A script; ``before(step, microbatch)`` is called before it computes one."""
    for step in worker.job.steps(
        dataset(24), global_batch=BATCH, microbatches=MICROBATCHES, steps=steps, shuffle=False
    ):
        worker.optimizer.zero_grad()
        for x, y in step:
            assert step.microbatch is not None
            before(step.number, step.microbatch)
            worker.computed.append((step.number, step.microbatch))
            torch.nn.functional.mse_loss(worker.net(x), y).backward()
        worker.optimizer.step()


def trained_alone(steps: int = STEPS) -> list[torch.Tensor]:
    """What one worker gets that nothing happens to."""
    crew = Crew()
    worker = crew.add("w0", lambda each: train(each, steps=steps))
    crew.direct(crew.generation("w0"))
    worker.start()
    crew.join()
    assert worker.error is None
    return worker.params
