"""The groups of simulated workers: how members of a generation meet, what they send each other, and how a group breaks.

In the place of Gloo. A group opens when every member has come and all reach each other. It breaks for the others when a
member's process ends or goes on to a newer generation. Where the network does not carry, nothing breaks: messages wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from craft.protocol.membership import Generation

from .clock import KERNEL
from .network import Network

if TYPE_CHECKING:
    from .workers import Worker

_AGAIN_S = 0.2


class Group:
    """One generation's, by its name: another lighthouse's of the same number is another one."""

    def __init__(self, network: Network, generation: Generation) -> None:
        self._network = network
        self.generation = generation
        self._members: dict[str, Worker] = {}
        self._gone: set[str] = set()
        self.is_open = False

    def come(self, worker: Worker) -> None:
        """A member is here and waits for the others."""
        self._members[worker.worker_id] = worker
        worker.process.on_exit.append(lambda: self.leave(worker))
        self._try()

    def _try(self) -> None:
        if self.is_open or self._gone or len(self._members) < len(self.generation.members):
            return
        if any(self.unreachable(each) for each in self._members.values()):
            self._network.machine.call_later(_AGAIN_S, self._try, context=KERNEL)
            return
        self.is_open = True
        for worker in self._members.values():
            # Each finds out on a thread; one that is stopped finds out later.
            worker.process.later(0.002 + self._network.delay_s(), worker.opened, self)

    def leave(self, worker: Worker) -> None:
        """A member is gone, or aborts the group: the others find it broken, as soon as that reaches them."""
        if worker.worker_id in self._gone:
            return
        self._gone.add(worker.worker_id)
        for other in self._members.values():
            if other is not worker:
                self._network.in_order(self._line(worker, other), other.process, other.broke, self, worker.worker_id)

    @staticmethod
    def _line(worker: Worker, other: Worker) -> tuple[str, str, str]:
        return worker.host, worker.worker_id, other.worker_id

    def missing(self) -> tuple[str, ...]:
        """Members that have not come."""
        return tuple(each for each in self.generation.worker_ids if each not in self._members)

    def unreachable(self, worker: Worker) -> tuple[str, ...]:
        """Members to which the network carries nothing from here."""
        return tuple(
            member.worker_id
            for member in self.generation.members
            if member.worker_id != worker.worker_id and not self._network.carries(worker.host, member.host)
        )

    def send(self, worker: Worker, message: Any) -> None:
        """Send a message to every other member. What a member sent arrives, though it ends meanwhile."""
        for other in self._members.values():
            if other is not worker and other.worker_id not in self._gone:
                self._network.in_order(
                    self._line(worker, other), other.process, other.take, self, worker.worker_id, message
                )


class Groups:
    """All groups, by the names of their generations."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._by_name: dict[str, Group] = {}

    def of(self, generation: Generation) -> Group:
        if generation.name not in self._by_name:
            self._by_name[generation.name] = Group(self._network, generation)
        return self._by_name[generation.name]
