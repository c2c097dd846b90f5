"""torch's process group inside a replica: fixed members, and a replaceable inside.

FSDP2, tensor parallel, DTensor and the script use it as any other. It has old and new names of torch side by side: some
callers, among them the functional collectives in C++, know only one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from craft.groups.sharded import collectives, reductions
from craft.groups.sharded.messages import Message, Posting
from craft.groups.sharded.operation import Operation, Replica
from craft.groups.sharded.refusals import check_even
from craft.groups.sharded.work import Done, UnderWay
from craft.protocol.errors import ConfigError

dist: Any = torch.distributed

BACKEND = "craft"

Tensors = Sequence[torch.Tensor]


class ReplicaGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose operations run in the calling thread, through the replica."""

    def __init__(self, replica: Replica, ranks: Sequence[int], name: str) -> None:
        """Take the positions of the members, this worker's among them."""
        self._position = ranks.index(replica.position)
        super().__init__(self._position, len(ranks))
        self._replica = replica
        self._ranks = tuple(ranks)
        self._name = name
        self._description = ""
        self._sequence = 0

    def _run(self, operation: Operation) -> Done:
        self._issue(operation)
        return Done(operation.outputs)

    @torch.no_grad()
    def _issue(self, operation: Operation) -> None:
        self._sequence += 1
        if len(self._ranks) == 1:
            operation.echo()
        else:
            self._replica.run(self._name, self._ranks, operation)

    # What torch asks about a group.

    def rank(self) -> int:
        return self._position

    def size(self) -> int:
        return len(self._ranks)

    getRank, getSize = rank, size

    def name(self) -> str:
        return BACKEND

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]

    def _get_backend(self, device: Any) -> Any:
        return _Backend(self)

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: the members count alike."""

    def _set_timeout(self, timeout: timedelta) -> None:
        """Waiting for a peer has no limit: CRAFT detects lost workers."""

    set_timeout = _set_timeout

    def abort(self) -> None:
        """The replica ends its groups, not the script."""

    shutdown = abort

    # Collectives.

    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Done:
        return self._run(collectives.AllGather(_plain(outputs[0]), _data(tensors[0]), self._position))

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done:
        _check_sizes("all_gather", output, tensor, self.size())
        output = _data(output)
        return self._run(collectives.AllGatherSingle(output, _data(tensor), self._position, self.size()))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Done:
        works = [self._allgather_base(*each) for each in zip(outputs, tensors, strict=True)]
        return _together(works)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Done:
        """Gather several tensors; ``outputs`` has a list for each member."""
        columns = zip(*outputs, strict=True)
        return _together([self.allgather([column], [each]) for column, each in zip(columns, tensors, strict=True)])

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Done:
        return _together([self._run(reductions.AllReduce(each, _op(opts), self.size())) for each in _plain(tensors)])

    allreduce_coalesced = allreduce

    def reduce_scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None) -> Done:
        parts = [_data(each) for each in tensors[0]]
        return self._run(reductions.ReduceScatter(_data(outputs[0]), parts, _op(opts), self._position))

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Done:
        _check_sizes("reduce_scatter", tensor, output, self.size())
        parts = _data(tensor).contiguous().view(-1).tensor_split(self.size())
        return self._run(reductions.ReduceScatter(_data(output), parts, _op(opts), self._position))

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Done:
        works = [self._reduce_scatter_base(*each, opts) for each in zip(outputs, tensors, strict=True)]
        return _together(works)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce(self, tensors: Tensors, opts: Any = None) -> Done:
        root = opts.rootRank
        return self._run(reductions.Reduce(_data(tensors[0]), _op(opts), root, self._position, self.size()))

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Done:
        return self._run(collectives.Broadcast(_data(tensors[0]), opts.rootRank, self._position))

    def gather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Done:
        targets = _plain(outputs[0]) if outputs and self._position == opts.rootRank else []
        return self._run(collectives.Gather(targets, _data(tensors[0]), opts.rootRank))

    def scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None) -> Done:
        parts = [_data(each) for each in tensors[0]] if tensors and self._position == opts.rootRank else []
        return self._run(collectives.Scatter(_data(outputs[0]), parts, opts.rootRank))

    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Done:
        parts = [_data(each) for each in tensors]
        check_even("all_to_all", [each.numel() for each in (*tensors, *outputs)])
        return self._run(collectives.AllToAll(_plain(outputs), parts, self._position))

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Done:
        received = received or [output.shape[0] // self.size()] * self.size()
        sent = sent or [tensor.shape[0] // self.size()] * self.size()
        check_even("all_to_all_single", [*received, *sent])
        operation = collectives.AllToAllSingle(_data(output), _data(tensor), received, sent, self._position)
        return self._run(operation)

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Done:
        return self._run(collectives.Barrier())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier()

    # Messages.

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Done:
        return self._message(Message(_data(tensors[0]), self._other(peer), tag, is_sent=True), self._position)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Done:
        return self._message(Message(_data(tensors[0]), self._other(peer), tag, is_sent=False), peer)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Done:
        raise ConfigError("recv without src: who sends first is not the same on every run; name the sender")

    def _message(self, message: Message, source: int) -> Done:
        self._issue(Posting(message))
        return UnderWay(message.outputs, lambda: self._issue(message), source)

    def _other(self, peer: int) -> int:
        if peer == self._position:
            raise ConfigError(f"rank {peer} of group {self._name!r} sends to itself; copy the tensor instead")
        return peer

    # What torch calls around several operations. Each of them is complete when it returns.

    def _start_coalescing(self, device: Any) -> None:
        pass

    def _end_coalescing(self, device: Any) -> Done:
        return Done(())


class _Backend:
    """What torch asks of the backend below a group; it has none of the extras."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_window = False

    def __init__(self, group: ReplicaGroup) -> None:
        self.rank = group.rank
        self.size = group.size
        self.name = group.name
        self.getBackendName = group.name

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values and memory of ``tensor``, and no part in autograd."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    # Not detach(): what another process wrote counts as no change, as in torch's own groups.
    return tensor.data


def _plain(tensors: Tensors) -> list[torch.Tensor]:
    return [_data(tensor) for tensor in tensors]


def _together(works: Sequence[Done]) -> Done:
    return Done([output for work in works for output in work.result()])


def _check_sizes(name: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ConfigError(
            f"{name} between {size} members: {tuple(whole.shape)} of {whole.dtype} is not {size} times "
            f"{tuple(part.shape)} of {part.dtype}"
        )
