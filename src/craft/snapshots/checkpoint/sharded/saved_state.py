"""Read the state of all positions of a checkpoint as one: whole tensors, or any region of them.

Input: a checkpoint of replicas of any size. Values that are the same on all positions are one; a tensor that is sharded is put
together from the regions that each position recorded. What differs between positions, and is no shard, belongs to that position:
only a job with the same mesh can use it, and it is refused by name here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from craft.protocol.errors import ConfigError, SnapshotCorrupt
from craft.snapshots.checkpoint.catalog import fetch_header
from craft.snapshots.checkpoint.entry_reader import EntryReader
from craft.snapshots.state.index import TensorEntry
from craft.snapshots.state.raw_memory import DTYPES, same_bits
from craft.snapshots.state.regions import Region, fits, is_tiled, overlaps, shape_of, whole
from craft.snapshots.state.serialized import decode_header
from craft.snapshots.state.shards import Placement, region_in
from craft.snapshots.state.tree import Array, Items, Node, Sharded, Table, Tensor
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import Tiers

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """A local tensor of one position."""

    position: int
    number: int
    """Of its entry there."""
    region: Region


class SavedTensor(NamedTuple):
    """A whole tensor, and where it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_sharded: bool
    sources: tuple[Source, ...]
    """Those that differ; together they hold every element once."""


class ShardedState:
    """A checkpoint of a job, with the states of all its positions."""

    def __init__(self, tiers: Tiers, manifest: Manifest) -> None:
        self.manifest = manifest
        parts = manifest.by_position()
        self.headers = [decode_header(fetch_header(tiers, each)) for each in parts]
        self.first = self.headers[0]
        """The header of position 0."""
        self.parallel = max(store.parallel for store in tiers.nearest_first)
        self._readers = [
            EntryReader(tiers.nearest_first, part, header.entries)
            for part, header in zip(parts, self.headers, strict=True)
        ]
        self._check_forms()

    def _check_forms(self) -> None:
        first = self.first
        for position, header in enumerate(self.headers):
            mine = [entry.name for entry in header.entries[: header.module_entries]]
            if mine != [entry.name for entry in first.entries[: first.module_entries]]:
                raise self._apart("the parameters and buffers of its modules", position)
            if header.names != first.names:
                raise self._apart("state_dict() of its modules", position)
            if list(header.skeleton) != list(first.skeleton):
                raise self._apart("what is registered", position)

    def _apart(self, what: str, position: int) -> ConfigError:
        return ConfigError(
            f"checkpoint {self.manifest.name} was saved by replicas of {len(self.headers)} workers, and {what} of position"
            f" {position} is not that of position 0: only a job with the same mesh and the same --workers-per-replica can go on"
            " from it"
        )

    # What is there.

    def module_tensor(self, number: int, pool: ThreadPoolExecutor) -> SavedTensor:
        """Return the parameter or buffer with this number."""
        found = [(header.shards or {}).get(number) for header in self.headers]
        is_buffer = number in (self.first.buffers or ())
        return self._saved([number] * len(self.headers), found, pool, is_buffer=is_buffer)

    def tensor(self, nodes: Sequence[Node], name: str, pool: ThreadPoolExecutor) -> SavedTensor:
        """Return the tensor that all positions have at one place of a registered object's state."""
        numbers, placements = [], []
        for position, node in enumerate(nodes):
            if not isinstance(node, Tensor | Sharded | Array) or isinstance(node, Sharded) != isinstance(
                nodes[0], Sharded
            ):
                raise self._apart(name, position)
            if not 0 <= node.index < len(self.headers[position].entries):
                raise SnapshotCorrupt("the header of a training state contradicts itself")
            numbers.append(node.index)
            placements.append(node.placement if isinstance(node, Sharded) else None)
        return self._saved(numbers, placements, pool)

    def same_value(self, name: str, nodes: Sequence[Node]) -> Node:
        """Return a value that must be the same on all positions: no tensor, and no table or list."""
        for position, node in enumerate(nodes):
            if node != nodes[0]:
                raise self._apart(name, position)
        return nodes[0]

    def below(self, name: str, nodes: Sequence[Node]) -> list[tuple[str | int, list[Node]]] | None:
        """Return the key of each item of a table or list, with what every position has there; None if it is neither."""
        first = nodes[0]
        if not isinstance(first, Table | Items):
            return None
        rows: list[Sequence[Node]] = []
        for position, node in enumerate(nodes):
            if (
                isinstance(first, Table)
                and isinstance(node, Table)
                and (node.kind, node.keys) == (first.kind, first.keys)
            ):
                rows.append(node.values)
            elif isinstance(first, Items) and isinstance(node, Items) and node.kind == first.kind:
                rows.append(node.items)
            else:
                raise self._apart(name, position)
            if len(rows[-1]) != len(rows[0]):
                raise self._apart(name, position)
        keys: Sequence[str | int] = first.keys if isinstance(first, Table) else range(len(first.items))
        return [(key, [row[place] for row in rows]) for place, key in enumerate(keys)]

    def _saved(
        self,
        numbers: Sequence[int],
        placements: Sequence[Placement | None],
        pool: ThreadPoolExecutor,
        is_buffer: bool = False,
    ) -> SavedTensor:
        entries = [header.entries[number] for header, number in zip(self.headers, numbers, strict=True)]
        first, name = entries[0], entries[0].name
        shape = placements[0].shape if placements[0] is not None else first.shape
        sources: dict[Region, Source] = {}
        differs = False
        for position, (entry, placement) in enumerate(zip(entries, placements, strict=True)):
            source = Source(position, numbers[position], self._region(entry, placement))
            other = (placement.shape if placement is not None else entry.shape) != shape
            if other or entry.dtype != first.dtype or (placement is None) != (placements[0] is None):
                raise self._apart(name, position)
            known = sources.setdefault(source.region, source)
            if known is not source and not self._is_equal(known, source, pool):
                if not is_buffer:
                    raise self._apart(name, position)
                differs = True
        if differs:
            # As elsewhere in torch: such as the statistics of batch norm, of which each position has seen other samples.
            logger.warning("buffer %s differs between the positions of a replica: that of position 0 is used", name)
        if not is_tiled(shape, list(sources)):
            raise self._apart(f"{name}, which is not divided into shards that fit together,", len(entries) - 1)
        return SavedTensor(name, first.dtype, shape, placements[0] is not None, tuple(sources.values()))

    def _region(self, entry: TensorEntry, placement: Placement | None) -> Region:
        region = region_in(placement, entry.shape)
        if region is None:
            assert placement is not None
            raise ConfigError(
                f"{entry.name} is placed as {', '.join(placement.placements)} in checkpoint {self.manifest.name}, which cannot be"
                " put together: only a job with the same mesh and the same --workers-per-replica can go on from it"
            )
        if (
            not fits(placement.shape if placement is not None else entry.shape, region)
            or shape_of(region) != entry.shape
        ):
            raise SnapshotCorrupt(f"the header of a training state contradicts itself: {entry.name} has another form")
        return region

    def _is_equal(self, one: Source, other: Source, pool: ThreadPoolExecutor) -> bool:
        """Return whether two positions have the same bytes; they are read only if they are in different chunks."""
        mine, theirs = self._readers[one.position], self._readers[other.position]
        if mine.location(one.number) == theirs.location(other.number):
            return True
        return same_bits(mine.read(one.number, pool), theirs.read(other.number, pool))

    # Reading.

    def read(self, saved: SavedTensor, region: Region, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return a region of a tensor, row by row; only the shards that have a part of it are read."""
        out = torch.empty(shape_of(region), dtype=DTYPES[saved.dtype])
        for source in saved.sources:
            for each in overlaps(region, source.region):
                place = out
                for axis, (begin, size) in enumerate(zip(each.begins, each.sizes, strict=True)):
                    place = place.narrow(axis, begin, size)
                place.copy_(self._readers[source.position].box(source.number, each.other_begins, each.sizes, pool))
        return out

    def read_whole(self, saved: SavedTensor, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return all of a tensor."""
        return self.read(saved, whole(saved.shape), pool)
