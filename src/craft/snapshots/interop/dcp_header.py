"""The header of a checkpoint from torch.distributed.checkpoint: its metadata as typed values, and the layout of its bytes.

It is encoded without pickle, and ``verify.py`` can read its outline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from craft.protocol.errors import ConfigError, SnapshotCorrupt
from craft.snapshots.state.index import ByteLayout, TensorEntry, decode_as, read_outline
from craft.snapshots.state.raw_memory import DTYPES
from craft.snapshots.store.manifest import Ref


class Share(NamedTuple):
    """What one rank has written."""

    chunks: tuple[Ref, ...]
    new_bytes: int


class Stored(NamedTuple):
    """Location of an item of a plan."""

    entry: TensorEntry
    share: Share | None
    """Index of the first item of each rank."""


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Form(msgspec.Struct, frozen=True, array_like=True):
    """A complete tensor, and the parts that it was saved in."""

    dtype: str
    size: tuple[int, ...]
    requires_grad: bool
    parts: tuple[Box, ...]


class Index(msgspec.Struct, frozen=True, array_like=True):
    """The item of an entry; one that is not a tensor has no offset."""

    key: str
    offset: tuple[int, ...] | None


class DcpHeader(msgspec.Struct, frozen=True):
    """Everything but the bytes."""

    entries: tuple[TensorEntry, ...]
    shares: tuple[int, ...]
    """Number of items that each rank has written."""
    indices: tuple[Index, ...]
    """Of each entry."""
    forms: dict[str, Form | None]
    """By key; None for values that are not tensors."""
    paths: dict[str, tuple[str | int, ...]] | None
    """Path of each key in a nested state dict."""
    version: str | None
    total_bytes: int


def make_header(metadata: Metadata, results: Sequence[Sequence[tuple[MetadataIndex, Stored]]]) -> DcpHeader:
    """Return the header of what all ranks have written."""
    flat = [each for rank in results for each in rank]
    entries = tuple(stored.entry for _, stored in flat)
    return DcpHeader(
        entries=entries,
        shares=tuple(len(rank) for rank in results),
        indices=tuple(Index(index.fqn, None if index.offset is None else tuple(index.offset)) for index, _ in flat),
        forms={key: _form(value) for key, value in metadata.state_dict_metadata.items()},
        paths=_paths(metadata.planner_data),
        # Planners leave it unset: torch lets the writer set it, so that a later torch knows what its planners expect.
        version=metadata.version or getattr(filesystem, "CURRENT_DCP_VERSION", None),
        total_bytes=ByteLayout(entries).total_bytes,
    )


def read_header(data: bytes) -> DcpHeader:
    """Return the header in ``data``, or raise SnapshotCorrupt if it is inconsistent."""
    read_outline(data)
    header = decode_as(DcpHeader, data, "a distributed checkpoint")
    dtypes = [entry.dtype for entry in header.entries] + [form.dtype for form in header.forms.values() if form]
    if len(header.indices) != len(header.entries) or any(dtype not in DTYPES for dtype in dtypes):
        raise SnapshotCorrupt("the header of a distributed checkpoint contradicts itself")
    return header


def metadata_of(header: DcpHeader) -> Metadata:
    """Return the metadata for planners; ``storage_data`` holds the number of each item's entry."""
    return Metadata(
        state_dict_metadata={key: _storage(form) for key, form in header.forms.items()},
        planner_data=header.paths,
        storage_data={MetadataIndex(index.key, index.offset): number for number, index in enumerate(header.indices)},
        version=header.version,
    )


def _form(value: TensorStorageMetadata | BytesStorageMetadata) -> Form | None:
    if isinstance(value, BytesStorageMetadata):
        return None
    parts = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks)
    dtype = str(value.properties.dtype).removeprefix("torch.")
    return Form(dtype, tuple(value.size), value.properties.requires_grad, parts)


def _storage(form: Form | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if form is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[form.dtype], requires_grad=form.requires_grad),
        size=torch.Size(form.size),
        chunks=[ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in form.parts],
    )


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]] | None:
    try:
        return msgspec.convert(planner_data, dict[str, tuple[str | int, ...]] | None)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"this planner stores custom data in the checkpoint, which is not supported ({error}): use DefaultSavePlanner"
        ) from None
