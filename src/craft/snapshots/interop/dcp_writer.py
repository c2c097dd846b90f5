"""The writer for ``torch.distributed.checkpoint.save`` and ``async_save``.

In: a plan, and a planner with the tensors. Out: on every rank chunks, and a file that keeps them from being collected; then,
from the coordinator, a header and the manifest, which lists the checkpoint. If a rank dies, nothing is listed.
"""

from __future__ import annotations

import dataclasses
import io
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from craft.protocol.errors import ConfigError, SnapshotError
from craft.snapshots.checkpoint.catalog import candidates
from craft.snapshots.checkpoint.chunking import Chunk, cut
from craft.snapshots.checkpoint.gc import apply_keep
from craft.snapshots.checkpoint.publish import in_parallel
from craft.snapshots.interop.dcp_header import Share, Stored, make_header
from craft.snapshots.state.index import ByteLayout, TensorEntry, entry_bytes
from craft.snapshots.state.raw_memory import resolved, view_of
from craft.snapshots.store.manifest import PARTS, Manifest, Ref, SaveOf, manifest_path, name_of, place_of_name, seal
from craft.snapshots.store.store import Adding, Store
from craft.snapshots.store.tiers import open_store, open_tiers

_NONCE = "dcp"
_BATCH_BYTES = 64 << 20
"""Bytes that are copied to memory at a time, or the largest tensor if that is more."""


class StorageWriter(storage.StorageWriter):  # type: ignore[misc,unused-ignore]
    """Writes to the store at ``url``, a path or such as ``s3://bucket/job``.

    ``step`` may also be given to each save, as its ``checkpoint_id``; without either, it follows the newest checkpoint.
    Saving a step again replaces it, unless ``overwrite`` is False. ``tag``: keep it for good, also under this name. ``keep``:
    remove older ones without a tag after each save; by default none is removed.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        step: int | None = None,
        *,
        tag: str | None = None,
        keep: int | None = None,
        overwrite: bool = True,
    ) -> None:
        self._url = os.fspath(url)
        self._step = None if step is None else _checked(step)
        self._tag = tag
        if keep is not None and keep < 1:
            raise ConfigError(f"StorageWriter(keep={keep}): at least 1 must be kept")
        self._keep = keep
        self._overwrite = overwrite
        self._rank = 0
        self._name = ""
        self._checkpoint_id = self._url
        self.save_id = str(uuid.uuid4())
        """Names one save; readers find it in ``Metadata.storage_meta``."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin a save of another step."""
        self.save_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._step = _checked(checkpoint_id)
            self._checkpoint_id = str(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Identify this save, for planners and readers."""
        return StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False leaves separate checkpoints of each rank that cannot be listed as one: save with"
                " use_collectives=True"
            )
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell all ranks the step, if only the coordinator knows it."""
        step = self._step
        if step is None:
            if not all(plan.usable for plan in plans):
                raise ConfigError(
                    "a planner that caches plans does not pass on which step is saved: give it, as StorageWriter(url, step)"
                    " or as checkpoint_id"
                )
            newest = candidates(open_tiers(self._url))
            step = newest[0].step + 1 if newest else 0
        self._name = _name(step)
        if not self._overwrite and self._name in {each.name for each in candidates(open_tiers(self._url))}:
            raise ConfigError(
                f"Checkpoint already exists: step {step} is in {self._url}, and StorageWriter(overwrite=False) replaces none."
                " Save another step, or leave overwrite=False out"
            )
        return [dataclasses.replace(plan, storage_data=self._name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = plan.storage_data if self._step is None else _name(self._step)
        store = open_store(self._url)
        share = _Items(plan.items, planner)
        if plan.items:
            with store.writing(f"rank{self._rank}") as guard:
                written = share.write(store)
                store.put(f"{_parts(name)}/{self._rank}.json", msgspec.json.encode(written.chunks))
                # Check only now: a collector that took this writer for dead may have removed chunks.
                guard.check()
        results = [
            WriteResult(item.index, entry_bytes(entry), (self._rank, Stored(entry, None if number else written)))
            for number, (item, entry) in enumerate(zip(plan.items, share.entries, strict=True))
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written: list the checkpoint."""
        by_rank = [[(each.index, each.storage_data[1]) for each in rank] for rank in results if rank]
        parts = {f"{_parts(self._name)}/{rank[0].storage_data[0]}.json" for rank in results if rank}
        data = msgspec.msgpack.encode(make_header(metadata, by_rank))
        header = Ref(blake3(data).hexdigest(), len(data))
        shares = [rank[0][1].share for rank in by_rank]
        store = open_store(self._url)
        with store.writing("coordinator") as guard:
            with store.adding() as adding:
                new = header.size if adding.add(header, lambda: memoryview(data)) else 0
            there = {found.path for found in store.files(_parts(self._name))}
            if not there >= parts:
                raise SnapshotError(
                    f"checkpoint {self._name} cannot be listed in {store.url}: a garbage collection there took it for one that"
                    " would never be complete; save it again"
                )
            guard.check()
            manifest = self._manifest(header, shares, new)
            store.put(manifest_path(self._name), seal(manifest))
            store.remove(there)
        if self._keep is not None:
            apply_keep(store, self._keep)

    def _manifest(self, header: Ref, shares: Sequence[Share], new_bytes: int) -> Manifest:
        place = place_of_name(self._name)
        assert place is not None
        chunks = tuple(chunk for share in shares for chunk in share.chunks)
        return Manifest(
            kind="dcp",
            name=self._name,
            branch=place[0],
            step=place[1],
            generation=0,
            time=time.time(),
            tag=self._tag,
            header=header,
            chunks=chunks,
            total_bytes=sum(chunk.size for chunk in chunks),
            new_bytes=new_bytes + sum(share.new_bytes for share in shares),
            save=SaveOf(self._checkpoint_id, self.save_id),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).isdigit()


def _checked(step: Any) -> int:
    if not str(step).isdigit():
        raise ConfigError(f"{step!r} is not a step: name a checkpoint by a whole number, such as checkpoint_id='1200'")
    return int(str(step))


def _name(step: int) -> str:
    # Without a nonce: ranks that cache their plans hear nothing, so that each must derive the name from the step.
    return name_of(0, step, _NONCE)


def _parts(name: str) -> str:
    # Another name: if a step is saved again, a manifest of the same name would make its parts look obsolete.
    return f"{PARTS}/{name}_parts"


class _Items:
    """What one rank writes: a sequence of bytes of which only a part is in memory."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self._items = items
        self._planner = planner
        # Items that are not tensors are small; their size is known only once they are there.
        self._plain = {
            number: _bytes(planner.resolve_data(item))
            for number, item in enumerate(items)
            if item.type == WriteItemType.BYTE_IO
        }
        self.entries = [self._entry(number, item) for number, item in enumerate(items)]
        self._layout = ByteLayout(self.entries)

    def write(self, store: Store) -> Share:
        """Write all of it to a store."""
        with store.adding() as adding:
            return self._add(store, adding)

    def _add(self, store: Store, adding: Adding) -> Share:
        found: dict[int, Ref] = {}
        new: list[int] = []
        held: dict[int, memoryview] = {}

        def add(chunk: tuple[int, memoryview]) -> None:
            number, data = chunk
            found[number] = ref = Ref(blake3(data).hexdigest(), len(data))
            if adding.add(ref, lambda: data):
                new.append(ref.size)

        for batch in _batches(cut(self.entries)):
            pieces = [self._layout.pieces_in(chunk.ranges) for _, chunk in batch]
            needed = {index for each in pieces for index, _, _ in each}
            held = {index: held[index] if index in held else self._memory(index) for index in needed}
            blocks = [_joined([held[index][begin:end] for index, begin, end in each]) for each in pieces]
            in_parallel(store, add, [(number, block) for (number, _), block in zip(batch, blocks, strict=True)])
        return Share(tuple(found[number] for number in range(len(found))), sum(new))

    def _entry(self, number: int, item: WriteItem) -> TensorEntry:
        if item.type == WriteItemType.BYTE_IO:
            return TensorEntry(item.index.fqn, "uint8", (len(self._plain[number]),), (1,))
        form = item.tensor_data
        assert form is not None
        shape = tuple(form.chunk.sizes)
        ends = zip(form.chunk.offsets, shape, strict=True)
        where = f"[{', '.join(f'{begin}:{begin + size}' for begin, size in ends)}]"
        whole = shape == tuple(form.size)
        dtype = str(form.properties.dtype).removeprefix("torch.")
        stride = torch.empty(shape, device="meta").stride()
        return TensorEntry(item.index.fqn if whole else f"{item.index.fqn}{where}", dtype, shape, tuple(stride))

    def _memory(self, number: int) -> memoryview:
        """Return the bytes of an item, on the CPU."""
        if number in self._plain:
            return memoryview(self._plain[number])
        entry = self.entries[number]
        data = self._planner.resolve_data(self._items[number])
        assert isinstance(data, torch.Tensor)
        tensor = resolved(entry.name, data).cpu().contiguous()
        if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{entry.dtype}", entry.shape):
            raise ConfigError(
                f"the planner promised {entry.name} as {entry.dtype}{list(entry.shape)}, and gave {tensor.dtype}"
                f"{list(tensor.shape)}: what is saved must not change meanwhile"
            )
        return view_of(tensor)


def _bytes(value: Any) -> bytes:
    assert isinstance(value, io.BytesIO)
    return value.getvalue()


def _joined(blocks: Sequence[memoryview]) -> memoryview:
    return blocks[0] if len(blocks) == 1 else memoryview(b"".join(blocks))


def _batches(chunks: Sequence[Chunk]) -> Iterator[list[tuple[int, Chunk]]]:
    """Yield chunks with their numbers, as many at a time as may be in memory."""
    batch: list[tuple[int, Chunk]] = []
    size = 0
    for number, chunk in enumerate(chunks):
        batch.append((number, chunk))
        size += chunk.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
