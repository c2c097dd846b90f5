"""The flat route: which rank sends which tree node to which, and the receive buffers.

Rank j owns chunk j of every bucket, receives all blocks of it, sums them along the tree, and sends the sum to all. Between two
ranks there is a shorter way for as many bytes: each sends its blocks whole, and both sum everything. The buffers live as long as
the plan, which in steady state is as long as the generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic

import torch

from craft.decide.step.combine import combine
from craft.decide.step.plan import share_of
from craft.decide.step.tree import Node, cover, fold
from craft.groups.group import P2P, Pending
from craft.protocol.control_word import Combined, Word
from craft.telemetry.fault_points import reach
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout

_WORD, _REST, BUFFERS, _ROUND = 0, 1, 2, 3
"""Tags of messages sent once per step; each round of the acknowledgement takes one."""
_CARRIED = 62
"""Tag of values that microbatches leave for the next step; below those of buckets."""
FIRST_BUCKET = 64
_LENGTH_BYTES = 4


def word_bytes(owners: Sequence[int], num_ranks: int, num_params: int) -> int:
    """Return the frame size of an ordinary word, the same on every member; a longer word's rest follows."""
    most = max((len(share_of(owners, rank)) for rank in range(num_ranks)), default=1)
    return 200 + most * (96 + num_params // 8)


class FlatRoute:
    """The route of one plan through one group. A group of one needs no connections: ``group`` is None then."""

    def __init__(self, group: P2P | None, layout: BucketLayout, owners: Sequence[int], word_bytes: int) -> None:
        self._group = group
        self._layout = layout
        self.owners = tuple(owners)
        self._size = group.size if group is not None else 1
        self._rank = group.rank if group is not None else 0
        self._peers = [rank for rank in range(self._size) if rank != self._rank]
        self._blocks = {rank: cover(share_of(owners, rank), len(owners)) for rank in range(self._size)}
        self._most_blocks = max((len(blocks) for blocks in self._blocks.values()), default=0)
        self._sums_all = self._size <= 2
        self.waited_s = 0.0
        """Time spent waiting for the others' blocks and words, since the caller last reset it."""
        self._num_present = sum(1 for owner in owners if owner >= 0)
        self._words = {peer: torch.zeros(word_bytes, dtype=torch.uint8) for peer in self._peers}
        self._word = torch.zeros(word_bytes, dtype=torch.uint8)
        self._word_memory = memoryview(self._word.numpy())  # type: ignore[arg-type]
        self._words_memory = {peer: memoryview(each.numpy()) for peer, each in self._words.items()}  # type: ignore[arg-type]
        self._signal = torch.zeros(1, dtype=torch.uint8)
        self._signals = [torch.zeros(1, dtype=torch.uint8) for _ in range((self._size - 1).bit_length())]
        self._chunks: list[list[slice]] = []
        self._inbox: list[dict[Node, torch.Tensor]] = []
        self._lay_out()
        self._sent: list[Pending] = []
        self._blocks_due: list[list[Pending]] = []
        self._results_due: list[Pending] = []
        self._words_due: list[Pending] = []
        self._signals_due: list[Pending] = []

    @property
    def group(self) -> P2P | None:
        return self._group

    def _lay_out(self) -> None:
        """Divide the buckets into chunks, and allocate receive buffers."""
        owners_of_chunks = 1 if self._sums_all else self._size
        self._chunks = [
            [bucket.chunk(0 if self._sums_all else rank, owners_of_chunks) for rank in range(self._size)]
            for bucket in self._layout.buckets
        ]
        self._inbox = [self._buffers(bucket) for bucket in range(len(self._layout.buckets))]

    def _buffers(self, bucket: int) -> dict[Node, torch.Tensor]:
        chunk = self._chunks[bucket][self._rank]
        spec = self._layout.buckets[bucket]
        return {
            node: torch.empty(chunk.stop - chunk.start, dtype=spec.dtype, device=spec.device)
            for peer in self._peers
            for node in self._blocks[peer]
        }

    def _result_tag(self, bucket: int) -> int:
        return FIRST_BUCKET + bucket * (1 + self._most_blocks)

    def _block_tag(self, bucket: int, position: int) -> int:
        return self._result_tag(bucket) + 1 + position

    def begin(self) -> None:
        """Begin an attempt: nothing of the previous one is left."""
        self._sent = []

    def post(self, result: Sequence[torch.Tensor]) -> None:
        """Post every receive of the step before any send: early messages go straight to their place."""
        group = self._group
        if group is not None:
            self._post_words(group)
            self._post_blocks(group, result)

    def _post_words(self, group: P2P) -> None:
        self._words_due = [group.recv(self._words[peer], peer, _WORD) for peer in self._peers]
        self._signals_due = [
            group.recv(signal, (self._rank - (1 << number)) % self._size, _ROUND + number)
            for number, signal in enumerate(self._signals)
        ]

    def _post_blocks(self, group: P2P, result: Sequence[torch.Tensor]) -> None:
        self._blocks_due, self._results_due = [], []
        for bucket, chunks in enumerate(self._chunks):
            self._blocks_due.append(self._recv_blocks(group, bucket))
            self._results_due += [
                group.recv(result[bucket][chunks[peer]], peer, self._result_tag(bucket))
                for peer in self._peers
                if chunks[peer].stop > chunks[peer].start and not self._sums_all
            ]

    def _recv_blocks(self, group: P2P, bucket: int) -> list[Pending]:
        inbox = self._inbox[bucket]
        return [
            group.recv(inbox[node], peer, self._block_tag(bucket, position))
            for peer in self._peers
            for position, node in enumerate(self._blocks[peer])
            if inbox[node].numel()
        ]

    def flushed(self, bucket: int) -> None:
        """Record that a bucket is ready, on the thread that filled it; a sending thread must know from when on."""

    def send_blocks(self, bucket: int, gradients: GradientAccumulator) -> None:
        """Send this rank's blocks of a bucket to the owners of its chunks."""
        for position, node in enumerate(self._blocks[self._rank]):
            flat = self._block(bucket, node, gradients)
            for peer in self._peers:
                chunk = self._chunks[bucket][peer]
                if chunk.stop > chunk.start:
                    self._send(flat[chunk], peer, self._block_tag(bucket, position))

    def reduce(self, bucket: int, gradients: GradientAccumulator, result: Sequence[torch.Tensor]) -> None:
        """Sum this rank's chunk along the tree and divide it by the number of microbatches."""
        if self._group is not None:
            due = self._blocks_due[bucket]
            if bucket == len(self._blocks_due) - 1:
                # The words come right behind the last blocks: one wait for both.
                due, self._words_due = [*due, *self._words_due], []
            self._await(due)
        self._mean(bucket, gradients, result, self._inbox[bucket])

    def _mean(
        self,
        bucket: int,
        gradients: GradientAccumulator,
        result: Sequence[torch.Tensor],
        inbox: Mapping[Node, torch.Tensor],
    ) -> None:
        chunk = self._chunks[bucket][self._rank]
        out = result[bucket][chunk]
        if not out.numel():
            return
        parts = dict(inbox)
        for node in self._blocks[self._rank]:
            parts[node] = self._block(bucket, node, gradients)[chunk]
        self._mean_into(out, parts)

    def _block(self, bucket: int, node: Node, gradients: GradientAccumulator) -> torch.Tensor:
        """Return a tree node held here, in memory that it can be sent from."""
        return gradients.find(node).tensors[bucket]

    def _await(self, due: list[Pending]) -> None:
        """Wait for the others' messages, and add to ``waited_s``."""
        assert self._group is not None
        began = monotonic()
        self._group.wait_all(due)
        self.waited_s += monotonic() - began

    def _mean_into(self, out: torch.Tensor, parts: dict[Node, torch.Tensor]) -> None:
        total = sum_into(out, parts, len(self.owners))
        if self._num_present > 1:
            _divide(total, self._num_present)

    def send_result(self, bucket: int, result: Sequence[torch.Tensor], step: int) -> None:
        """Send this rank's chunk of the result to all; ``step`` is for fault points."""
        chunk = self._chunks[bucket][self._rank]
        if chunk.stop > chunk.start and not self._sums_all:
            for peer in self._peers:
                self._send(result[bucket][chunk], peer, self._result_tag(bucket))
                reach("result_part", step)

    def combine(self, words: Sequence[Word]) -> Combined:
        """Combine the words of all members, given in rank order."""
        return combine(words)

    def share_buffers(self, flat: torch.Tensor, source: int) -> None:
        """Send the module buffers from ``source`` to all."""
        assert self._group is not None
        if self._rank == source:
            for peer in self._peers:
                self._send(flat, peer, BUFFERS)
        else:
            self._group.recv(flat, source, BUFFERS).wait()

    def share_carried(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Send each rank's row of bytes to all; the others' rows are receive buffers."""
        assert self._group is not None
        due = [self._group.recv(row, rank, _CARRIED) for rank, row in rows.items() if rank != self._rank]
        if self._rank in rows:
            for peer in self._peers:
                self._send(rows[self._rank], peer, _CARRIED)
        self._group.wait_all(due)

    def send_word(self, data: bytes) -> None:
        """Send this member's word to all: its length, and as much as fits into the frame."""
        room = self._word.numel() - _LENGTH_BYTES
        frame = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:room]
        self._word_memory[: len(frame)] = frame
        rest = _tensor(data[room:]) if len(data) > room else None
        for peer in self._peers:
            self._send(self._word, peer, _WORD)
            if rest is not None:
                self._send(rest, peer, _REST)

    def words(self, own: bytes) -> list[bytes]:
        """Return every member's word, in rank order."""
        if self._group is not None:
            # Already awaited, unless there was no bucket to exchange, or one that did not have to wait.
            self._await(self._words_due)
        return [own if rank == self._rank else self._word_of(rank) for rank in range(self._size)]

    def _word_of(self, peer: int) -> bytes:
        frame = self._words_memory[peer]
        length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
        data = bytes(frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
        if length > len(data):
            assert self._group is not None
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._group.recv(rest, peer, _REST).wait()
            data += rest.numpy().tobytes()
        return data

    def acknowledge(self, sent_first: Callable[[], None]) -> None:
        """Acknowledge the whole result; return once every member, idle ones included, has done so.

        In round k each rank tells the one 2**k ahead what it has heard so far: after log2(size) rounds, from all. ``sent_first``
        is called after the first message is sent.
        """
        for number, due in enumerate(self._signals_due):
            self._send(self._signal, (self._rank + (1 << number)) % self._size, _ROUND + number)
            if number == 0:
                sent_first()
            assert self._group is not None
            # After the last signal all have acknowledged, so all sends have arrived: this only completes them.
            self._group.wait_all([due] if number < len(self._signals_due) - 1 else [due, *self._sent])
        self._sent = []

    def wait_results(self, result: Sequence[torch.Tensor]) -> None:
        """Wait until every chunk of ``result`` is here."""
        if self._group is not None:
            self._group.wait_all(self._results_due)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        assert self._group is not None
        self._sent.append(self._group.send(tensor, peer, tag))


def _divide(total: torch.Tensor, count: int) -> None:
    """Divide in place, with the same bits on any device; for a power of two, multiplying gives them faster."""
    if count & (count - 1) == 0:
        total.mul_(1.0 / count)
    elif not total.is_cuda:
        total.div_(count)
    else:
        # For a plain number, CUDA would multiply by its reciprocal; and a short dtype may not represent the number.
        wide = torch.promote_types(total.dtype, torch.float32)
        quotient = total.to(wide).div_(torch.full((), count, dtype=wide, device=total.device))
        if wide != total.dtype:
            total.copy_(quotient)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sum_into(out: torch.Tensor, parts: dict[Node, torch.Tensor], num_microbatches: int) -> torch.Tensor:
    """Sum ``parts`` along the tree into ``out``; write only to ``out`` and fresh temporaries.

    One of ``parts`` may share memory with ``out``: it is then overwritten, once it has been added.
    """
    own = {id(part) for part in parts.values() if part.data_ptr() == out.data_ptr()}
    free = [] if own else [out]

    def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if id(left) in own:
            target = left
        elif id(right) in own:
            target = right
        else:
            target = free.pop() if free else torch.empty_like(out)
            own.add(id(target))
        return torch.add(left, right, out=target)

    total = fold(parts, num_microbatches, add)
    if total is None:
        return out.zero_()
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)
    return out
