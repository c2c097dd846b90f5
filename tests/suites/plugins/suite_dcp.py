"""pytest plugin: ``craft.dcp`` in the place of torch's file readers and writers for torch.distributed.checkpoint.

torch names a checkpoint by its folder. Here that folder is a store with one checkpoint in it. How torch lays out its files
(threads, extensions, files per rank) means nothing to a store, and is left out.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as dcp

# torch's own classes that are derived from those which are replaced are made before.
from torch.distributed.checkpoint import _fsspec_filesystem, _storage_utils, filesystem, format_utils, hf_storage

from craft.dcp import StorageReader, StorageWriter

_Path = str | os.PathLike[str]


class CraftWriter(StorageWriter):
    """Takes what ``FileSystemWriter`` and ``FsspecWriter`` take."""

    def __init__(self, path: _Path, *_: Any, overwrite: bool = True, **__: Any) -> None:
        super().__init__(path, 0, overwrite=overwrite)

    def reset(self, checkpoint_id: _Path | int | None = None) -> None:
        super().reset()
        if checkpoint_id is not None:
            self._url = self._checkpoint_id = os.fspath(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        return True


class CraftReader(StorageReader):
    """Takes what ``FileSystemReader`` and ``FsspecReader`` take."""

    def __init__(self, path: _Path, *_: Any, **__: Any) -> None:
        super().__init__(path)

    def reset(self, checkpoint_id: _Path | int | None = None) -> None:
        super().reset()
        if checkpoint_id is not None:
            self._url = os.fspath(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        return True


for _module in (dcp, filesystem, _storage_utils, format_utils, hf_storage):
    for _name, _ours in (("FileSystemWriter", CraftWriter), ("FileSystemReader", CraftReader)):
        setattr(_module, _name, _ours)
for _name, _ours in (("FsspecWriter", CraftWriter), ("FsspecReader", CraftReader)):
    setattr(_fsspec_filesystem, _name, _ours)
