"""The files of a checkpoint: its manifest, and the parts that members write before there is one. No torch.

Each is JSON with a digest over all of it; a reader checks every field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
from blake3 import blake3

from craft.protocol.errors import BitsDiffer, SnapshotCorrupt

PLAIN_VERSION = 1
VERSION = 2
"""Of files of checkpoints whose model is sharded; all others have the plain one, which older CRAFT reads, too."""
MANIFESTS = "manifests"
PARTS = "parts"
CHUNKS = "chunks"

_NAME = re.compile(r"(\d{4,})-(\d{12,})-[0-9A-Za-z_]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_ANY_HASH = re.compile(rb"[0-9a-f]{64}")


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """A chunk, by the hash of its bytes."""

    hash: str
    size: int


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """A chunk and its number in the state."""

    number: int
    hash: str
    size: int


class PartOfPosition(msgspec.Struct, frozen=True, array_like=True):
    """Which part of a sharded checkpoint a member wrote: twins divide the state of their position."""

    position: int
    of_positions: int
    share: int
    of_shares: int


class PositionPart(msgspec.Struct, frozen=True, array_like=True):
    """The state of one position in a sharded checkpoint."""

    header: Ref
    num_chunks: int
    """Its chunks follow those of the positions before it."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one member of a checkpoint has written."""

    version: int = PLAIN_VERSION
    name: str
    branch: int
    step: int
    generation: int
    time: float
    """When its copy was taken, in seconds since 1970."""
    tag: str | None
    part: int
    of: int
    header: Ref
    """The same on all members of a position, unless their states differ."""
    chunks: tuple[Numbered, ...]
    """Numbered within the position."""
    new_bytes: int
    place: PartOfPosition | msgspec.UnsetType = msgspec.UNSET
    """Omitted where a replica is one worker."""
    digest: str = ""

    @property
    def writes_header(self) -> bool:
        """Whether this member writes the header of its position."""
        return self.part == 0 if self.place is msgspec.UNSET else self.place.share == 0


class SaveOf(msgspec.Struct, frozen=True):
    """One call of ``torch.distributed.checkpoint.save``."""

    checkpoint_id: str
    """Its destination."""
    save_id: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint."""

    version: int = PLAIN_VERSION
    kind: Literal["job", "dcp"] = "job"
    name: str
    branch: int
    step: int
    """Committed steps in it."""
    generation: int
    time: float
    """When it was taken, in seconds since 1970."""
    tag: str | None = None
    header: Ref
    chunks: tuple[Ref, ...]
    total_bytes: int
    """Of all chunks, without the header."""
    new_bytes: int
    """Bytes that had to be written for it."""
    save: SaveOf | msgspec.UnsetType = msgspec.UNSET
    """The save of torch.distributed.checkpoint that wrote it; omitted if unknown, as in a job's checkpoints."""
    positions: tuple[PositionPart, ...] | msgspec.UnsetType = msgspec.UNSET
    """The positions of a replica, in order; omitted where a replica is one worker. ``header`` is that of the first."""
    digest: str = ""

    @property
    def num_positions(self) -> int:
        """Workers of a replica."""
        return len(self.positions) if self.positions else 1

    @property
    def refs(self) -> tuple[Ref, ...]:
        """Everything that it needs: headers and chunks."""
        headers = [each.header for each in self.positions] if self.positions else [self.header]
        return (*headers, *self.chunks)

    def by_position(self) -> list[Manifest]:
        """Return the state of each position, as the manifest of an unsharded checkpoint."""
        if not self.positions:
            return [self]
        found, first = [], 0
        for each in self.positions:
            chunks = self.chunks[first : first + each.num_chunks]
            first += each.num_chunks
            found.append(
                msgspec.structs.replace(
                    self,
                    header=each.header,
                    chunks=chunks,
                    total_bytes=sum(ref.size for ref in chunks),
                    positions=msgspec.UNSET,
                )
            )
        return found

    @property
    def order(self) -> tuple[int, int, str]:
        """The sort key; the newest is the largest."""
        return (self.branch, self.step, self.name)


class _Versioned(msgspec.Struct):
    version: int


Sealed = TypeVar("Sealed", Part, Manifest)


def name_of(branch: int, step: int, nonce: str) -> str:
    """Return the name of a checkpoint; names sort in the order of history."""
    return f"{branch:04d}-{step:012d}-{nonce}"


def place_of_name(name: str) -> tuple[int, int] | None:
    """Return (branch, step) of a name; None if it is not one."""
    found = _NAME.fullmatch(name)
    return (int(found.group(1)), int(found.group(2))) if found else None


def manifest_path(name: str) -> str:
    return f"{MANIFESTS}/{name}.json"


def part_path(name: str, part: int, of: int) -> str:
    return f"{PARTS}/{name}/{part}-of-{of}.json"


def chunk_path(digest: str) -> str:
    return f"{CHUNKS}/{digest[:2]}/{digest}"


def seal(value: Sealed) -> bytes:
    """Return the bytes of its file, including the digest."""
    digest = blake3(msgspec.json.encode(msgspec.structs.replace(value, digest=""))).hexdigest()
    return msgspec.json.encode(msgspec.structs.replace(value, digest=digest))


def read_manifest(data: bytes, file: str) -> Manifest:
    """Return the manifest in ``data``; raise SnapshotCorrupt, which names ``file``, if anything is wrong."""
    found = _unseal(data, Manifest, file)
    if sum(ref.size for ref in found.chunks) != found.total_bytes:
        raise SnapshotCorrupt(f"{file}: the sizes of its chunks do not add up to {found.total_bytes} bytes", file)
    if found.positions and (
        sum(each.num_chunks for each in found.positions) != len(found.chunks)
        or min(each.num_chunks for each in found.positions) < 0
        or found.positions[0].header != found.header
    ):
        raise SnapshotCorrupt(f"{file}: its positions do not match its chunks", file)
    return found


def read_part(data: bytes, file: str) -> Part:
    """Return the part in ``data``; raise SnapshotCorrupt, which names ``file``, if anything is wrong."""
    found = _unseal(data, Part, file)
    if not 0 <= found.part < found.of:
        raise SnapshotCorrupt(f"{file}: there is no part {found.part} of {found.of}", file)
    if (place := found.place) is not msgspec.UNSET and not (
        0 <= place.position < place.of_positions and 0 <= place.share < place.of_shares
    ):
        raise SnapshotCorrupt(f"{file}: there is no {place}", file)
    return found


def _unseal(data: bytes, kind: type[Sealed], file: str) -> Sealed:
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version > VERSION:
            raise SnapshotCorrupt(
                f"{file} was written by a newer CRAFT, in format {version} where this one reads {VERSION}: update CRAFT",
                file,
            )
        found: Sealed = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotCorrupt(f"{file} is damaged, or not a file of a checkpoint: {error}", file) from None
    # Byte for byte: CRAFT writes each value in one way only.
    if seal(found) != data:
        raise SnapshotCorrupt(f"{file} is damaged: its digest does not match its content", file)
    _check_place(found, file)
    refs = found.refs if isinstance(found, Manifest) else [found.header, *found.chunks]
    _check_sizes(refs, found.new_bytes, file)
    return found


def _check_place(found: Part | Manifest, file: str) -> None:
    sharded = bool(found.positions) if isinstance(found, Manifest) else found.place is not msgspec.UNSET
    version = VERSION if sharded else PLAIN_VERSION
    if place_of_name(found.name) != (found.branch, found.step) or found.version != version or found.generation < 0:
        raise SnapshotCorrupt(f"{file}: its name, branch and step do not match", file)
    where = manifest_path(found.name) if isinstance(found, Manifest) else part_path(found.name, found.part, found.of)
    if not f"/{file}".endswith(f"/{where}"):
        raise SnapshotCorrupt(f"{file} holds another file, {where}: it was moved there", file)


def _check_sizes(refs: Sequence[Ref | Numbered], new_bytes: int, file: str) -> None:
    for ref in refs:
        if not _HASH.fullmatch(ref.hash):
            raise SnapshotCorrupt(f"{file}: {ref.hash[:80]!r} is not the hash of a chunk", file)
        if ref.size < 0:
            raise SnapshotCorrupt(f"{file}: the chunk {ref.hash} cannot have {ref.size} bytes", file)
    if new_bytes < 0:
        raise SnapshotCorrupt(f"{file}: {new_bytes} new bytes are impossible", file)


def hashes_in(data: bytes) -> set[str]:
    """Return every hash that a manifest or part names, even in a damaged file: rather too many than one too few."""
    return {found.decode() for found in _ANY_HASH.findall(data)}


def is_newer(data: bytes) -> bool:
    """Return whether a file has a newer format than ours."""
    try:
        return msgspec.json.decode(data, type=_Versioned).version > VERSION
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def merge(parts: Sequence[Part], file: str) -> Manifest:
    """Return the manifest of a checkpoint whose parts are all present; every caller makes the same."""
    first = parts[0]
    for part in parts:
        if (part.name, part.of, part.tag) != (first.name, first.of, first.tag):
            raise _unlike(first, part, file)
    if [part.part for part in parts] != list(range(first.of)):
        raise SnapshotCorrupt(f"{file}: the parts of checkpoint {first.name} do not match", file)
    columns = _columns(parts, file)
    found = [_merged_chunks(column, file) for column in columns]
    chunks = [each for column in found for each in column]
    sharded = first.place is not msgspec.UNSET
    return Manifest(
        version=VERSION if sharded else PLAIN_VERSION,
        name=first.name,
        branch=first.branch,
        step=first.step,
        generation=first.generation,
        time=min(part.time for part in parts),
        tag=first.tag,
        header=columns[0][0].header,
        chunks=tuple(chunks),
        total_bytes=sum(each.size for each in chunks),
        new_bytes=sum(part.new_bytes for part in parts),
        positions=tuple(PositionPart(column[0].header, len(refs)) for column, refs in zip(columns, found, strict=True))
        if sharded
        else msgspec.UNSET,
    )


def _columns(parts: Sequence[Part], file: str) -> list[list[Part]]:
    """Return the parts of each position, in the order of shares."""
    if all(part.place is msgspec.UNSET for part in parts):
        return [list(parts)]
    columns: dict[int, dict[int, Part]] = {}
    forms: set[tuple[int, int, int]] = set()
    for part in parts:
        if part.place is not msgspec.UNSET:
            columns.setdefault(part.place.position, {})[part.place.share] = part
            forms.add((part.place.position, part.place.of_positions, part.place.of_shares))
    of_shares = {position: of for position, _, of in forms}
    ok = {of for _, of, _ in forms} == {len(columns)} and len(forms) == len(columns)
    ok = ok and sorted(columns) == list(range(len(columns))) and sum(map(len, columns.values())) == len(parts)
    if not ok or any(sorted(found) != list(range(of_shares[each])) for each, found in columns.items()):
        raise SnapshotCorrupt(f"{file}: the parts of checkpoint {parts[0].name} do not match", file)
    return [[columns[each][share] for share in sorted(columns[each])] for each in sorted(columns)]


def _merged_chunks(column: Sequence[Part], file: str) -> list[Ref]:
    """Return the chunks of one position, of which each member wrote some."""
    first = column[0]
    for part in column:
        if part.header != first.header:
            raise _unlike(first, part, file)
    chunks = sorted((each for part in column for each in part.chunks), key=lambda each: each.number)
    if [each.number for each in chunks] != list(range(len(chunks))):
        raise SnapshotCorrupt(f"{file}: the parts of checkpoint {first.name} do not match", file)
    return [Ref(each.hash, each.size) for each in chunks]


def _unlike(first: Part, part: Part, file: str) -> BitsDiffer:
    return BitsDiffer(
        f"{file}: members {first.part} and {part.part} of checkpoint {first.name} hold different training states"
    )
