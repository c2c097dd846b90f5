"""Read torch's Flight Recorder: the collectives that the script itself started.

``read_collectives`` runs on a separate thread when the agent asks: a main thread that is blocked in a collective lets others
run. CRAFT's groups use send and receive, which the recorder skips, and are not part of torch's default group.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch.distributed

from craft.protocol.values.inspection import MAX_ENTRIES, Collective, Collectives

# The names that torch does not export by type.
dist: Any = torch.distributed
c10d: Any = torch._C._distributed_c10d


class _RecorderEntry(msgspec.Struct):
    """The fields used of one entry of the recorder."""

    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int = 0
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    retired: bool = False
    is_p2p: bool = False


class _Trace(msgspec.Struct):
    entries: tuple[_RecorderEntry, ...] = ()


def read_collectives(number: int, worker_id: str) -> Collectives:
    """Return the script's latest collectives; none if it has no default group."""
    if not (dist.is_available() and dist.is_initialized()):
        return Collectives(number=number, worker_id=worker_id)
    trace = msgspec.json.decode(c10d._dump_fr_trace_json(), type=_Trace)
    groups = script_groups()
    entries = [_collective(each) for each in trace.entries if each.process_group[0] in groups and not each.is_p2p]
    return Collectives(
        number=number,
        worker_id=worker_id,
        rank=dist.get_rank(),
        groups=groups,
        entries=tuple(entries[-MAX_ENTRIES:]),
    )


def script_groups() -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group that the script made."""
    made: dict[Any, str] = dist.distributed_c10d._world.pg_names
    return {name: tuple(sorted(dist.get_process_group_ranks(group))) for group, name in made.items()}


def _collective(entry: _RecorderEntry) -> Collective:
    return Collective(
        group=entry.process_group[0],
        number=entry.collective_seq_id,
        name=entry.profiling_name.partition(":")[2],
        sizes=entry.input_sizes,
        dtypes=entry.input_dtypes,
        done=entry.retired,
    )
