"""Random numbers by place: all generators that scripts draw from."""

from __future__ import annotations

import random

import numpy
import torch

from craft.worker import seeds


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(numpy.random.random())


def test_the_same_place_gives_the_same_numbers_whatever_was_drawn_before() -> None:
    seeds.seed_all(seeds.derive(1, seeds.COMPUTE, 2, 3))
    first = draw()
    draw()

    seeds.seed_all(seeds.derive(1, seeds.COMPUTE, 2, 3))

    assert draw() == first


def test_every_part_of_a_place_counts() -> None:
    places = [
        seeds.derive(1, seeds.COMPUTE, 2, 3),
        seeds.derive(2, seeds.COMPUTE, 2, 3),
        seeds.derive(1, seeds.DATA, 2, 3),
        seeds.derive(1, seeds.COMPUTE, 3, 2),
        seeds.derive(1, seeds.COMPUTE, 23),
        seeds.derive(1, seeds.COMPUTE, 2),
    ]

    assert len(set(places)) == len(places)


def test_a_seed_fits_every_generator() -> None:
    values = [seeds.derive(0, seeds.DATA, step, microbatch) for step in range(50) for microbatch in range(20)]

    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)


def test_a_derived_seed_never_changes_from_version_to_version() -> None:
    """Resuming with a newer CRAFT must draw the same numbers."""
    assert seeds.derive(0, seeds.COMPUTE, 0, 0) == 6307049828757543193
