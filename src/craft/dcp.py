"""Storage for torch.distributed.checkpoint over the same stores as a job's own checkpoints: ``craft.dcp`` for scripts.

``dcp.save(state, storage_writer=StorageWriter(url, step))``, ``dcp.load(state, storage_reader=StorageReader(url))``. Every rank
writes its own chunks, and what is there already is not written again; the coordinator lists the checkpoint when all have.
Readers check every chunk. torch's planners do the resharding.
"""

from __future__ import annotations

from craft.snapshots.interop.dcp_reader import StorageReader
from craft.snapshots.interop.dcp_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
