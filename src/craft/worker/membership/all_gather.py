"""All-gather of small messages: over the whole group, or among some of its members.

Over the whole group, each member writes its bytes into its slice of a zeroed tensor; the sum over all members is the
concatenation. That is one small all-reduce, which Gloo does with far fewer wake-ups than sends and receives between all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from craft.groups.group import P2P, Group


def gather(group: Group | None, data: bytes) -> list[bytes]:
    """Return every member's ``data``, in rank order."""
    if group is None:
        return [data]
    lengths = torch.zeros(group.size, dtype=torch.int64)
    lengths[group.rank] = len(data)
    group.all_reduce(lengths).wait()
    return _concatenate(group, data, lengths.tolist())


def _concatenate(group: Group, data: bytes, lengths: list[int]) -> list[bytes]:
    joined = torch.zeros(max(1, sum(lengths)), dtype=torch.uint8)
    begin = sum(lengths[: group.rank])
    if data:
        joined[begin : begin + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.all_reduce(joined).wait()
    flat = joined.numpy().tobytes()
    ends = [sum(lengths[: rank + 1]) for rank in range(len(lengths))]
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def gather_among(
    group: P2P, peers: Sequence[int], row: torch.Tensor, tags: tuple[int, int], halfway: Callable[[], None]
) -> list[torch.Tensor]:
    """Send a row of bytes to ``peers``, and return theirs in the same order; ``tags`` are of lengths and of data.

    ``halfway`` is called when all lengths are here.
    """
    length, data = tags
    own, sizes = torch.tensor([row.numel()]), [torch.zeros(1, dtype=torch.int64) for _ in peers]
    due = [group.recv(size, peer, length) for size, peer in zip(sizes, peers, strict=True)]
    group.wait_all([*due, *(group.send(own, peer, length) for peer in peers)])
    halfway()
    rows = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    due = [group.recv(each, peer, data) for each, peer in zip(rows, peers, strict=True) if each.numel()]
    if row.numel():
        due += [group.send(row, peer, data) for peer in peers]
    group.wait_all(due)
    return rows
