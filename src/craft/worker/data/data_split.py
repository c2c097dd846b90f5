"""Which part of a microbatch's samples a worker of a sharded replica computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from craft.protocol.errors import ConfigError

T = TypeVar("T")

DATA_DIMENSIONS = ("shard", "dp_shard", "fsdp")
"""Names of mesh dimensions over which samples are divided, unless the script says otherwise."""


class DataSplit(NamedTuple):
    """Part ``part`` of ``parts`` equal ones."""

    part: int = 0
    parts: int = 1
    mates: tuple[int, ...] = (0,)
    """The positions of a replica that have the parts of one copy of the samples, in the order of parts."""

    def of(self, samples: Sequence[T]) -> Sequence[T]:
        """Return this part of ``samples``; raise ConfigError if they cannot be divided evenly."""
        share, left = divmod(len(samples), self.parts)
        if left:
            raise ConfigError(
                f"a microbatch has {len(samples)} samples, which {self.parts} workers of a replica cannot divide evenly: choose"
                f" batches so that each microbatch has a multiple of {self.parts}"
            )
        return samples[self.part * share : (self.part + 1) * share]

    @property
    def lane(self) -> tuple[int, ...]:
        """What tells the random numbers of this part from those of the others; empty if it is the only one."""
        return (self.part,) if self.parts > 1 else ()


WHOLE = DataSplit()
"""All samples: a replica is one worker, or its workers see the same ones."""


def split_of(
    position: int, size: int, dimensions: Mapping[str, int] | None, names: Collection[str] | None
) -> DataSplit:
    """Return the part of the worker at ``position`` of a replica of ``size`` workers.

    ``dimensions``: the mesh of ``job.mesh``, in order; None: the script made none. ``names``: the dimensions over which samples
    are divided, or None for those with the usual names.
    """
    if size == 1:
        return WHOLE
    if dimensions is None:
        raise ConfigError(
            "job.steps() in a sharded replica before job.mesh(...): make the mesh of the model with job.mesh(shard=...), so that"
            " CRAFT knows how the samples of a microbatch are divided"
        )
    chosen = [each for each in dimensions if each in DATA_DIMENSIONS] if names is None else list(names)
    if unknown := [each for each in chosen if each not in dimensions]:
        raise ConfigError(
            f"job.steps(split=...) names {', '.join(unknown)}, but job.mesh has the dimensions {', '.join(dimensions)}"
        )
    part, parts, rest, left = 0, 1, position, size
    mates: tuple[int, ...] = (0,)
    for name, extent in dimensions.items():
        left //= extent
        coordinate, rest = divmod(rest, left)
        if name in chosen:
            part, parts = part * extent + coordinate, parts * extent
        steps = range(extent) if name in chosen else (coordinate,)
        mates = tuple(mate + left * each for mate in mates for each in steps)
    return DataSplit(part, parts, mates)
