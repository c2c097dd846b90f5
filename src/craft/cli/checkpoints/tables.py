"""Format checkpoints as lines of text, and as records for ``--json``. Pure: ``commands.py`` prints them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from craft.cli.output.echo import columns
from craft.snapshots.checkpoint.suspect import SuspectCheckpoints
from craft.snapshots.checkpoint.verify import Difference, TensorChange
from craft.snapshots.state.index import TensorEntry
from craft.snapshots.store.manifest import Manifest
from craft.telemetry.explain.amounts import size

_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def as_record(manifest: Manifest, doubts: SuspectCheckpoints) -> dict[str, Any]:
    """Return a checkpoint for ``--json``: its manifest without the chunks, and why it is suspect, or null."""
    record: dict[str, Any] = msgspec.to_builtins(manifest)
    hidden = ("version", "header", "chunks", "digest")
    shown = {name: value for name, value in record.items() if name not in hidden}
    doubt = doubts.about(manifest)
    return shown | {"chunks": len(manifest.chunks), "suspect": str(doubt) if doubt is not None else None}


def listing(found: Sequence[Manifest], doubts: SuspectCheckpoints, now: float) -> Iterator[str]:
    """Yield a table of checkpoints, and why some are suspect. ``now`` is in seconds since 1970."""
    rows = [("name", "step", "branch", "tag", "taken", "size", "new", "kind")]
    for each in found:
        size_and_new = (size(each.total_bytes), size(each.new_bytes))
        taken = f"{age(now - each.time)} ago"
        kind = each.kind if doubts.about(each) is None else f"{each.kind}, suspect"
        rows.append((each.name, str(each.step), str(each.branch), each.tag or "-", taken, *size_and_new, kind))
    yield from columns(rows)
    for doubt in dict.fromkeys(filter(None, map(doubts.about, found))):
        yield f"suspect: {doubt}. --resume leaves it out, unless it is named by its step"


def age(seconds: float) -> str:
    """Return how long ago, in the largest unit of which there are two."""
    for unit_s, unit in _UNITS:
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return "1 s"


def differences(before: Manifest, after: Manifest, found: Difference) -> Iterator[str]:
    """Yield how two checkpoints differ: a line for each tensor, and what they share."""
    rows = [(change.name, _form(change), size(change.size), _what(change, before, after)) for change in found.tensors]
    yield from columns(rows)
    for name in found.values:
        yield f"{name}: its values that are not tensors differ"
    if not found.tensors and not found.values:
        yield f"{before.name} and {after.name} hold the same bits"
    changed = sum(change.size for change in found.tensors)
    yield f"{len(found.tensors)} tensors differ ({size(changed)}), {found.same_tensors} are the same"
    yield f"{size(found.shared_bytes)} of {size(found.bytes_before)} and {size(found.bytes_after)} are stored once for both"


def differences_record(before: Manifest, after: Manifest, found: Difference) -> dict[str, Any]:
    """Return the same for ``--json``."""
    tensors = [
        {
            "name": each.name,
            "before": _entry_record(each.before),
            "after": _entry_record(each.after),
            "bytes": each.size,
        }
        for each in found.tensors
    ]
    return {"before": before.name, "after": after.name, **found._asdict(), "tensors": tensors}


def _entry_record(entry: TensorEntry | None) -> dict[str, Any] | None:
    return None if entry is None else {"dtype": entry.dtype, "shape": entry.shape}


def _form(change: TensorChange) -> str:
    forms = [f"{entry.dtype}{list(entry.shape)}" for entry in (change.before, change.after) if entry is not None]
    return " -> ".join(dict.fromkeys(forms))


def _what(change: TensorChange, before: Manifest, after: Manifest) -> str:
    if change.after is None:
        return f"only in {before.name}"
    if change.before is None:
        return f"only in {after.name}"
    same_form = (change.before.dtype, change.before.shape) == (change.after.dtype, change.after.shape)
    return "differs" if same_form else "has another form"
