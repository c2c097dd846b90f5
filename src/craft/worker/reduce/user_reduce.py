"""Average gradients over a step's microbatches, as often as a body of ``job.attempts`` asks.

Input: the ``p.grad`` of its microbatches, moved into tree nodes. Output: the mean in ``p.grad``, the same bits on every worker.
It uses the exchange of a step, among the current members, and is provisional until the step is committed. Members that are not
current are sent each outcome, and replay it later to become current.

On devices it uses NCCL, whose messages have no tags and unchecked lengths. Sends and receives match nevertheless: before a
reduction uses the device, all members tell each other by Gloo which one it is, and it ends only when the device has finished it
and all have acknowledged. Nothing else in ``job.attempts`` uses NCCL: the step's exchange after the body has no buckets there. So
between any two current members the order of messages is that of the reductions. A member that is not current sends, receives and
awaits nothing there; all know from the previous commit from which step on it does. After a loss the communicator is aborted, and
never used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
from blake3 import blake3

from craft.groups.group import P2P, DeviceP2P, Pending
from craft.groups.subgroup import part_of
from craft.protocol.control_word import Combined, MicrobatchRecord, Word
from craft.protocol.errors import ConfigError, GroupError
from craft.worker.membership.devices import device_of
from craft.worker.membership.ft_calls import exchange_named
from craft.worker.membership.participant import Participant
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout, trainable_of
from craft.worker.reduce.exchange import Attempt
from craft.worker.reduce.flats import Flats, hand_out
from craft.worker.reduce.module_buffers import ModuleBuffers
from craft.worker.reduce.routes.choice import route_of
from craft.worker.reduce.routes.flat import FlatRoute

_FIRST_TAG = 1 << 16
"""Above all tags of a step's regular exchange."""
_SIGNATURE = 48
"""Tag of the reduction's signature; next to those of its word, below those of its buckets."""
_LENGTH, _DATA = 40, 41
"""Tags of messages to members that are not current; next to those of calls between the steps."""


class Reduced(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one reduction, for members that took no part in it."""

    flats: tuple[bytes, ...]
    present: bytes
    metrics: tuple[tuple[str, float], ...]
    buffers: tuple[int, ...]
    packed: bytes
    parts: tuple[bytes, ...] = ()
    """Of a call: the parts of all participants."""
    sample: bytes = b""
    """Hash of a part of microbatch 0's gradient, for a joiner to compare with its own."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reduced).decode


class ReducePhase:
    """Some parameters whose gradients are reduced together."""

    def __init__(self, params: Sequence[torch.nn.Parameter], bucket_bytes: int) -> None:
        device_of((f"number {index}", param) for index, param in enumerate(params))
        self.layout = BucketLayout(params, bucket_bytes)
        self.gradients = GradientAccumulator(self.layout)
        self.result: Flats | None = None
        self.route: FlatRoute | None = None
        self.way: tuple[object, ...] = ()
        """What the route was made for: the group, its participants, and the owners."""
        kinds = [(str(param.dtype), tuple(param.shape)) for param in params]
        self._kind = msgspec.json.encode((kinds, self.layout.trainable))

    def signature(self, place: int) -> bytes:
        """Return a hash of the parameters and position, equal on all workers that make the same reduction."""
        return bytes(blake3(self._kind + str(place).encode()).digest(length=8))


class UserReductions:
    """The reductions of one ``job.attempts`` loop. Owned by the main thread."""

    def __init__(self, participant: Participant, buffers: ModuleBuffers, bucket_bytes: int) -> None:
        """``buffers`` are those of the script's modules: a reduction sets them to what microbatch 0 made of them."""
        self._participant = participant
        self._buffers = buffers
        self._bucket_bytes = bucket_bytes
        self._phases: dict[tuple[object, ...], ReducePhase] = {}
        self._told: list[tuple[torch.Tensor, Pending]] = []

    def phase(self, params: Sequence[torch.nn.Parameter]) -> ReducePhase:
        """Return the phase of these parameters, the same one in every step."""
        key = (*map(id, params), *trainable_of(params))
        if key not in self._phases:
            self._phases[key] = ReducePhase(params, self._bucket_bytes)
        return self._phases[key]

    @property
    def _ranks(self) -> list[int]:
        """Ranks of the participants."""
        ledger = self._participant.ledger
        return [rank for rank, member in enumerate(ledger.members) if member not in ledger.idle]

    def reduce(
        self, phase: ReducePhase, place: int, records: Sequence[MicrobatchRecord], sample: bytes = b""
    ) -> dict[str, float]:
        """Set ``p.grad`` to the mean over all microbatches; raise GroupError if a worker is lost meanwhile.

        Returns the means of the logged scalars.
        """
        attempt = self._attempt(phase, place)
        word = Word(
            step=self._participant.step,
            records=tuple(records),
            buffers=self._buffers.changed,
            rewinds=self._participant.ledger.rewinds,
            sample=sample,
        )
        if not attempt.finish(lambda: word):
            assert attempt.error is not None
            self._participant.broke(attempt.error)
            raise attempt.error
        combined = attempt.combined
        assert combined is not None
        scale = len(self._participant.ledger.owners) / combined.total_weight if combined.total_weight else 1.0
        hand_out(phase.layout, attempt.result, combined.present, scale)
        phase.gradients.clear()
        self._tell(attempt.result.tensors, combined, attempt.buffers)
        self._take_buffers(combined.buffers, attempt.buffers)
        return dict(combined.metrics)

    def call(self, name: str, data: bytes) -> list[bytes]:
        """Return the bytes of all current members; like a reduction, it is provisional until the step is committed."""
        with self._telling():
            parts = exchange_named(self._participant, name, data, "in the body of an attempt")
            if self._speaks:
                self._send(_encode(Reduced((), b"", (), (), b"", tuple(parts))))
        return parts

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Report it if the group breaks within: perhaps no other worker notices."""
        try:
            yield
        except GroupError as error:
            self._participant.broke(error)
            raise

    def _take_buffers(self, changed: tuple[int, ...], packed: torch.Tensor | None) -> None:
        self._buffers.commit(changed, packed)
        # The script's changes from here on stay.
        self._buffers.begin()

    def _attempt(self, phase: ReducePhase, place: int) -> Attempt:
        participant, ranks = self._participant, self._ranks
        group, owners = participant.group, tuple(map(ranks.index, participant.ledger.owners))
        among = part_of(group, ranks, _FIRST_TAG) if group is not None and len(ranks) > 1 else None
        if among is not None:
            _check_device(phase.layout, group)
            self._agree(among, phase.signature(place))
        # With fewer microbatches than workers, another worker does not change the owners.
        way = (group, *ranks, owners)
        if phase.route is None or phase.way != way:
            hosts = [participant.hosts[rank] for rank in ranks] if among is not None else []
            phase.route, phase.way = route_of(among, hosts, phase.layout, owners), way
        if phase.result is None:
            phase.result = Flats(phase.layout)
        attempt = Attempt(participant.step, among, phase.route, phase.gradients, phase.result, self._buffers.empty_like)
        if self._buffers.changed:
            attempt.buffers = self._buffers.pack()
        return attempt

    def _agree(self, among: P2P, signature: bytes) -> None:
        """Return once all participants are at the same reduction; raise GroupError if one is lost meanwhile."""
        peers = [rank for rank in range(among.size) if rank != among.rank]
        own = torch.frombuffer(bytearray(signature), dtype=torch.uint8)
        theirs = [torch.zeros_like(own) for _ in peers]
        with self._telling():
            due = [among.recv(each, peer, _SIGNATURE) for peer, each in zip(peers, theirs, strict=True)]
            among.wait_all([*due, *(among.send(own, peer, _SIGNATURE) for peer in peers)])
        if not all(torch.equal(own, each) for each in theirs):
            raise ConfigError(
                f"step {self._participant.step}: workers reduce different gradients in the same place: the body of an"
                " attempt must call attempt.microbatches with the same parameters, in the same order, on every worker"
            )

    def take_back(self) -> None:
        """Drop the failed attempt's gradients and receive buffers, which may still be written to."""
        for phase in self._phases.values():
            phase.gradients.drop()
            phase.route, phase.way, phase.result = None, (), None
        self._told = []

    # For members that are not current.

    def _tell(self, tensors: Sequence[torch.Tensor], combined: Combined, packed: torch.Tensor | None) -> None:
        if self._speaks:
            reduced = Reduced(
                flats=tuple(map(_bytes, tensors)),
                present=combined.present,
                metrics=combined.metrics,
                buffers=combined.buffers,
                packed=_bytes(packed) if combined.buffers and packed is not None else b"",
                sample=combined.sample,
            )
            with self._telling():
                self._send(_encode(reduced))

    @property
    def _speaks(self) -> bool:
        """Whether some member is not current, and this worker sends it the outcomes."""
        ledger = self._participant.ledger
        return bool(ledger.idle) and ledger.rank == self._ranks[0]

    def _send(self, data: bytes) -> None:
        group, ledger = self._participant.group, self._participant.ledger
        assert group is not None
        length, flat = torch.tensor([len(data)]), torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        for rank, member in enumerate(ledger.members):
            if member in ledger.idle:
                self._told.append((length, group.send(length, rank, _LENGTH)))
                if data:
                    self._told.append((flat, group.send(flat, rank, _DATA)))

    def end(self) -> None:
        """Tell followers that the body is over: they have all outcomes of this step. Raises GroupError."""
        group = self._participant.group
        if group is None or not self._speaks:
            return
        with self._telling():
            self._send(b"")
            group.wait_all([pending for _, pending in self._told])
        self._told = []

    def replay(self, phase: ReducePhase, reduced: Reduced) -> dict[str, float]:
        """Set ``p.grad`` from a received outcome; return what ``reduce`` returned on the sender."""
        tensors = [
            torch.frombuffer(bytearray(data), dtype=bucket.dtype).to(bucket.device) if data else bucket.empty()
            for data, bucket in zip(reduced.flats, phase.layout.buckets, strict=True)
        ]
        hand_out(phase.layout, Flats(phase.layout, tensors), reduced.present, 1.0)
        packed = torch.frombuffer(bytearray(reduced.packed), dtype=torch.uint8) if reduced.packed else None
        self._take_buffers(reduced.buffers, packed)
        return dict(reduced.metrics)


def listen(participant: Participant) -> tuple[Reduced, ...]:
    """Receive all outcomes of the step in flight, on a member that is not current, until the body ends."""
    ledger, group = participant.ledger, participant.group
    assert group is not None
    first = next(rank for rank, member in enumerate(ledger.members) if member not in ledger.idle)
    found: list[Reduced] = []
    while True:
        length = torch.zeros(1, dtype=torch.int64)
        group.wait_all([group.recv(length, first, _LENGTH)])
        if not int(length):
            return tuple(found)
        data = torch.empty(int(length), dtype=torch.uint8)
        group.wait_all([group.recv(data, first, _DATA)])
        found.append(_decode(data.numpy().tobytes()))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _check_device(layout: BucketLayout, group: P2P | None) -> None:
    """Raise ConfigError if gradients are on another device than the group's."""
    if isinstance(group, DeviceP2P) and layout.on_device and layout.buckets[0].device != group.device:
        raise ConfigError(
            f"parameters of attempt.microbatches(...) are on {layout.buckets[0].device}, and this worker's device is"
            f" {group.device}: put them on job.device"
        )
