"""Select checkpoints by step, name or tag, as a person or a script wrote them. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from craft.protocol.errors import ConfigError
from craft.snapshots.store.manifest import Manifest, place_of_name

_SHOWN = 8


def select_all(found: Sequence[Manifest], url: str, which: Sequence[str]) -> list[Manifest]:
    """Return all of ``found`` that have one of these steps, names or tags; each of them must match."""
    for each in which:
        select(found, url, each)
    return [each for each in found if {str(each.step), each.name, each.tag} & set(which)]


def select(found: Sequence[Manifest], url: str, which: str | int | None = None) -> Manifest:
    """Return the newest of ``found`` with this step, name or tag, or the newest of all. They are sorted, newest first."""
    if not found:
        raise ConfigError(f"{url} holds no checkpoints: give the URL that the job writes to ('--checkpoints')")
    if which is None:
        return found[0]
    for manifest in found:
        if str(which) in (str(manifest.step), manifest.name, manifest.tag):
            return manifest
    steps = ", ".join(dict.fromkeys(str(manifest.step) for manifest in found[:_SHOWN]))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise ConfigError(f"{url} holds no checkpoint {which}: it has those of steps {steps}{more}; give a step or a name")


def names_one(text: str) -> bool:
    """Return whether a word on a command line is the step or name of a checkpoint, rather than a URL."""
    return text.isdigit() or place_of_name(text) is not None
