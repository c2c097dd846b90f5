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
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from craft.protocol.errors import ConfigError
from craft.snapshots.checkpoint.catalog import candidates, select
from craft.snapshots.interop.dcp_contents import DcpContents
from craft.snapshots.interop.job_contents import JobContents
from craft.snapshots.store.tiers import open_tiers


class StorageReader(storage.StorageReader):  # type: ignore[misc,unused-ignore]
    """Reads the checkpoint with this step, name or tag from the store at ``url``; by default the newest that ``StorageWriter``
    saved. A load may name another one as its ``checkpoint_id``. Where there are none, it reads those of a job, as
    ``{"model": ..., "registered": {...}, "step": ..., "branch": ...}``."""

    def __init__(self, url: str | os.PathLike[str], step_or_name: int | str | None = None) -> None:
        self._url = os.fspath(url)
        self._which = step_or_name
        self._contents: DcpContents | JobContents | None = None
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
        # Without saves of StorageWriter, those of a job: its tensors are whole, whatever its mesh.
        manifest = select([each for each in listed if each.kind == "dcp"] or listed, tiers.url, self._which)
        self._contents = (DcpContents if manifest.kind == "dcp" else JobContents)(tiers, manifest)
        metadata = self._contents.metadata()
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
    def _found(self) -> DcpContents | JobContents:
        assert self._contents is not None, "torch reads the metadata first"
        return self._contents

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))
