"""Random numbers by place: all generators that scripts draw from."""

from __future__ import annotations

import random

import numpy
import torch

from craft.worker.data import rng


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(numpy.random.random())


def test_the_same_place_gives_the_same_numbers_whatever_was_drawn_before() -> None:
    rng.seed_all(rng.derive(1, rng.COMPUTE, 2, 3))
    first = draw()
    draw()

    rng.seed_all(rng.derive(1, rng.COMPUTE, 2, 3))

    assert draw() == first


def test_every_part_of_a_place_counts() -> None:
    places = [
        rng.derive(1, rng.COMPUTE, 2, 3),
        rng.derive(2, rng.COMPUTE, 2, 3),
        rng.derive(1, rng.DATA, 2, 3),
        rng.derive(1, rng.COMPUTE, 3, 2),
        rng.derive(1, rng.COMPUTE, 23),
        rng.derive(1, rng.COMPUTE, 2),
    ]

    assert len(set(places)) == len(places)


def test_a_seed_fits_every_generator() -> None:
    values = [rng.derive(0, rng.DATA, step, microbatch) for step in range(50) for microbatch in range(20)]

    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)


def test_a_derived_seed_never_changes_from_version_to_version() -> None:
    """Resuming with a newer CRAFT must draw the same numbers."""
    assert rng.derive(0, rng.COMPUTE, 0, 0) == 6307049828757543193
