"""One checkpoint that ``torch.distributed.checkpoint.save`` wrote, of which any part can be read.

``dcp_reader.py`` reads what a plan asks for, and ``export.py`` complete tensors.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from craft.protocol.errors import SnapshotCorrupt
from craft.snapshots.checkpoint.catalog import fetch_header
from craft.snapshots.checkpoint.entry_reader import EntryReader
from craft.snapshots.interop.dcp_header import metadata_of, read_header
from craft.snapshots.state.raw_memory import DTYPES
from craft.snapshots.store.manifest import Manifest
from craft.snapshots.store.tiers import Tiers


class DcpContents:
    """The items of the ranks that saved it."""

    def __init__(self, tiers: Tiers, manifest: Manifest) -> None:
        self.manifest = manifest
        self.header = header = read_header(fetch_header(tiers, manifest))
        self.parallel = max(store.parallel for store in tiers.nearest_first)
        self._numbers = metadata_of(header).storage_data
        self._reader = EntryReader(tiers.nearest_first, manifest, header.entries, header.shares)

    def metadata(self) -> Metadata:
        """Return what planners need to know."""
        return metadata_of(self.header)

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
