"""The route of sharded replicas: blocks travel between the workers of one position, words between all members.

Each position has its own tensors. Its twins sum them along the tree like the members of a job whose model is not sharded. One
control word over all members decides about the step, and a step is acknowledged by all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from craft.decide.step.columns import combine_columns
from craft.decide.step.replicas import Layout
from craft.groups.group import P2P, DeviceP2P
from craft.groups.subgroup import part_of
from craft.protocol.control_word import Combined, Word
from craft.protocol.membership import DROPPED
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.routes.flat import FlatRoute
from craft.worker.reduce.routes.flat_cuda import FlatCudaRoute, HostRoute


class TwinRoute(FlatRoute):
    """The route of one plan, for one worker of a sharded replica. Subclasses carry blocks of devices."""

    def __init__(
        self, group: P2P, replicas: Layout, layout: BucketLayout, owners: Sequence[int], word_bytes: int
    ) -> None:
        """``owners`` are replicas."""
        self._replicas = replicas
        self._position = replicas.position_of(group.rank)
        self._twins = replicas.column(self._position, group.size)
        column = part_of(group, self._twins, 0) if len(self._twins) > 1 else None
        super().__init__(column, layout, [self._twin_of(owner) for owner in owners], word_bytes)
        self._all = FlatRoute(group, BucketLayout([], 0), (), word_bytes)
        """Carries words and acknowledgements, and no blocks."""

    def _twin_of(self, replica: int) -> int:
        """Return the index among the twins of this position's worker in ``replica``."""
        if replica == DROPPED:
            return DROPPED
        return self._twins.index(self._replicas.ranks_of(replica)[self._position])

    @property
    def group(self) -> P2P | None:
        return self._all.group

    def begin(self) -> None:
        super().begin()
        self._all.begin()

    def post(self, result: Sequence[torch.Tensor]) -> None:
        self._all.post(())
        super().post(result)

    def _post_words(self, group: P2P) -> None:
        """Post nothing between twins: words travel between all."""

    def send_word(self, data: bytes) -> None:
        self._all.send_word(data)

    def words(self, own: bytes) -> list[bytes]:
        found = self._all.words(own)
        self.waited_s += self._all.waited_s
        self._all.waited_s = 0.0
        return found

    def combine(self, words: Sequence[Word]) -> Combined:
        return combine_columns(words, self._replicas, self._position)

    def share_buffers(self, flat: torch.Tensor, source: int) -> None:
        if self._group is not None:
            super().share_buffers(flat, self._twins.index(source))

    def share_carried(self, rows: Mapping[int, torch.Tensor]) -> None:
        if self._group is not None:
            super().share_carried({self._twins.index(rank): row for rank, row in rows.items()})

    def acknowledge(self, sent_first: Callable[[], None]) -> None:
        self._all.acknowledge(sent_first)
        if self._group is not None:
            # All have acknowledged, so all sends have arrived: this only completes them.
            self._group.wait_all(self._sent)
        self._sent = []


class TwinCudaRoute(TwinRoute, FlatCudaRoute):
    """Carries blocks between the devices of twins, by NCCL."""


class TwinHostRoute(TwinRoute, HostRoute):
    """Carries blocks of devices through host memory."""


def twin_route(group: P2P, replicas: Layout, layout: BucketLayout, owners: Sequence[int], word_bytes: int) -> TwinRoute:
    """Return the route of a sharded replica that the group and the layout need."""
    if not layout.on_device:
        return TwinRoute(group, replicas, layout, owners, word_bytes)
    kind = TwinCudaRoute if isinstance(group, DeviceP2P) else TwinHostRoute
    return kind(group, replicas, layout, owners, word_bytes)
