"""The reader for ``torch.distributed.checkpoint.load``.

In: a plan of what this rank needs: any part of any tensor, however they were sharded when they were saved. Out: its bytes in
the planner's tensors, every chunk checked. Only chunks that hold a part of it are read.
"""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from craft.protocol.errors import ConfigError, SnapshotCorrupt
from craft.snapshots.checkpoint.catalog import candidates, fetch_header, select
from craft.snapshots.checkpoint.entry_reader import EntryReader
from craft.snapshots.interop.dcp_header import metadata_of, read_header
from craft.snapshots.state.raw_memory import DTYPES
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import Tiers, open_tiers


class StorageReader(storage.StorageReader):  # type: ignore[misc,unused-ignore]
    """Reads the checkpoint with this step, name or tag from the store at ``url``; by default the newest that ``StorageWriter``
    saved. A load may name another one as its ``checkpoint_id``."""

    def __init__(self, url: str | os.PathLike[str], step_or_name: int | str | None = None) -> None:
        self._url = os.fspath(url)
        self._which = step_or_name
        self._contents: Contents | None = None
        self.load_id = str(uuid.uuid4())
        """Names one load, in ``Metadata.storage_meta``."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._which = checkpoint_id if isinstance(checkpoint_id, int) else os.fspath(checkpoint_id)

    # The last parameter is not called kwargs: torch would ask again, for the metadata of this rank alone.
    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        tiers = open_tiers(self._url)
        listed = candidates(tiers)
        found = [manifest for manifest in listed if manifest.kind == "dcp"]
        if listed and not found:
            raise ConfigError(
                f"the checkpoints in {tiers.url} belong to a job: export one with 'craft checkpoints export --format dcp'"
            )
        manifest = select(found, tiers.url, self._which)
        self._contents = Contents(tiers, manifest)
        metadata = metadata_of(self._contents.header)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        if (written_by := manifest.save) is not msgspec.UNSET:
            metadata.storage_meta.checkpoint_id = written_by.checkpoint_id
            metadata.storage_meta.save_id = written_by.save_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._found.manifest.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: check that all ranks found the same newest checkpoint."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise ConfigError(
                f"a checkpoint was saved to {self._url} while ranks looked for the newest one, and not all found the same:"
                " load again, or say which step is meant"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        contents = self._found
        with ThreadPoolExecutor(contents.parallel, "craft-dcp") as pool:
            # In the order of the store, so that items in one chunk are read one after the other.
            for item in sorted(plan.items, key=lambda each: contents.number(each.storage_index)):
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(contents.read(item, pool).numpy().tobytes()))
                    continue
                target = planner.resolve_tensor(item).detach()
                target.copy_(contents.read(item, pool))
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def _found(self) -> Contents:
        assert self._contents is not None, "torch reads the metadata first"
        return self._contents

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


class Contents:
    """One checkpoint, of which any part can be read. ``export.py`` reads complete tensors from it."""

    def __init__(self, tiers: Tiers, manifest: Manifest) -> None:
        self.manifest = manifest
        self.header = header = read_header(fetch_header(tiers, manifest))
        self.parallel = max(store.parallel for store in tiers.nearest_first)
        self._numbers = metadata_of(header).storage_data
        self._reader = EntryReader(tiers.nearest_first, manifest, header.entries, header.shares)

    def number(self, index: MetadataIndex) -> int:
        """Return the number of an item's entry."""
        try:
            return int(self._numbers[index])
        except KeyError:
            raise SnapshotCorrupt(f"checkpoint {self.manifest.name} lists {index}, and does not have it") from None

    def read(self, item: ReadItem, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return the part of a tensor that an item asks for, or all bytes of what is not a tensor."""
        number = self.number(item.storage_index)
        entry = self.header.entries[number]
        if item.type == LoadItemType.BYTE_IO or not entry.shape:
            return self._all(item.storage_index, pool)
        return self._reader.box(number, item.storage_offsets, item.lengths, pool)

    def whole(self, key: str, pool: ThreadPoolExecutor) -> torch.Tensor:
        """Return a tensor as it was before it was sharded, or the bytes of what is not a tensor."""
        form = self.header.forms[key]
        if form is None:
            return self._all(MetadataIndex(key), pool)
        tensor = torch.empty(form.size, dtype=DTYPES[form.dtype])
        for box in form.parts:
            place = tensor
            for axis, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                place = place.narrow(axis, first, size)
            place.copy_(self._all(MetadataIndex(key, box.offsets), pool))
        return tensor

    def _all(self, index: MetadataIndex, pool: ThreadPoolExecutor) -> torch.Tensor:
        return self._reader.read(self.number(index), pool)
