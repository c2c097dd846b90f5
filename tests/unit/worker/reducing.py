"""A worker in the body of an attempt, between real connections: for tests of what it reduces, and with whom."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from craft.decide.step import ledger as ledgers
from craft.decide.step.ledger import Ledger
from craft.groups.group import Group
from craft.protocol.control_word import MicrobatchRecord
from craft.protocol.membership import Generation, Member
from craft.worker.membership.client import MembershipClient
from craft.worker.membership.participant import Participant
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.user_reduce import ReducePhase, UserReductions, listen

from .blocks import leaf, mean

SIZES = {"discriminator": (300, 5000, 40), "generator": (7000, 10)}
BUCKET_BYTES = 1 << 13


class Reducing:
    """One member of ``group``, with gradients of two networks."""

    def __init__(self, group: Group, hosts: str, device: str = "cpu") -> None:
        self.worker_id = f"w{group.rank}"
        members = tuple(Member(worker_id=f"w{rank}", host=host) for rank, host in enumerate(hosts))
        membership = MembershipClient(self.worker_id, "127.0.0.1", b"", lambda *_: None)
        self.participant = Participant(self.worker_id, membership, "redo", lambda _: None, None)
        self.participant.generation = Generation(number=group.generation, nonce="", members=members)
        self.participant.group = group
        self.reductions = UserReductions(self.participant, ModuleBuffers([]), BUCKET_BYTES)
        self._params = {
            name: [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
            for name, sizes in SIZES.items()
        }

    def begin(self, step: int, idle: Collection[str], microbatches: int) -> None:
        """A step begins in which those of ``idle`` do not keep pace."""
        generation = self.participant.generation
        assert generation is not None
        ledger = Ledger(
            worker_id=self.worker_id,
            step=step,
            generation=generation.number,
            members=generation.worker_ids,
            idle=frozenset(idle),
            settled=True,
        )
        self.participant._ledger = ledgers.begin(ledger, microbatches)

    def body(self, order: Sequence[str]) -> str:
        """Reduce the networks one after the other, or take what came of it; returns what is wrong with that."""
        phases = [self.reductions.phase(self._params[name]) for name in order]
        if self.worker_id in self.participant.ledger.idle:
            for phase, reduced in zip(phases, listen(self.participant), strict=True):
                self.reductions.replay(phase, reduced)
        else:
            for place, phase in enumerate(phases):
                self.reductions.reduce(phase, place, self._compute(phase))
            self.reductions.end()
        return "; ".join(f"{name}: {problem}" for name in order if (problem := self._problem(name)))

    def _compute(self, phase: ReducePhase) -> list[MicrobatchRecord]:
        records, size = [], len(self.participant.ledger.owners)
        for microbatch in self.participant.ledger.share:
            phase.gradients.start(microbatch, size, None)
            for index, param in enumerate(phase.layout.params):
                (param * leaf(microbatch, index, param.numel()).to(param.device)).sum().backward()
            present = phase.gradients.finish().present
            records.append(MicrobatchRecord(microbatch=microbatch, weight=1.0, present=present))
        return records

    def _problem(self, name: str) -> str:
        for index, param in enumerate(self._params[name]):
            expected = mean(self.participant.ledger.owners, index, param.numel())
            if param.grad is None or not torch.equal(param.grad.cpu(), expected):
                return f"the gradient of parameter {index} is not the mean over all microbatches"
        return ""


BOTH = tuple(SIZES)
STEPS = 4


def one_more_comes(group: Group, hosts: str, device: str = "cpu") -> Iterator[str]:
    """For each step, what is wrong with what came of it: all but the last one keep pace, and tell it; then it does, too.

    With fewer microbatches than workers, and with more. ``hosts`` has a letter for each rank.
    """
    worker, last = Reducing(group, hosts, device), {f"w{group.size - 1}"}
    for step, (idle, microbatches) in enumerate([(last, 5), (last, 2), (set(), 2), (set(), 7)]):
        worker.begin(step, idle, microbatches)
        yield worker.body(BOTH)
