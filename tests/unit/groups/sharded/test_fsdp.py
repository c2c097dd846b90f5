"""FSDP2 and tensor parallel train over the groups of a replica as they do over torch's own."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from .conftest import Run
from .models import train_2d, train_alone, train_fsdp


def same(first: tuple[list[Any], Any], second: tuple[list[Any], Any]) -> bool:
    return all(numpy.array_equal(a, b) for a, b in zip(first[0], second[0], strict=True)) and first[1] == second[1]


def assert_as_alone(results: list[tuple[list[Any], list[float]]], outputs: int = 7) -> None:
    params, norms = train_alone(outputs)
    for got, got_norms in results:
        for mine, theirs in zip(got, params, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), theirs.detach(), rtol=1e-4, atol=1e-5)
        assert got_norms == pytest.approx(norms, rel=1e-4)


def test_two_workers_train_as_one_and_twice_the_same(two: Run) -> None:
    """P1: the order of additions is that of the positions."""
    first, again = two(train_fsdp, {}, {}), two(train_fsdp, {}, {})

    assert_as_alone(first)
    assert same(first[0], first[1]) and same(first[0], again[0])


def test_four_workers_train_as_one_and_twice_the_same(four: Run) -> None:
    first, again = four(train_fsdp, {}, {}), four(train_fsdp, {}, {})

    assert_as_alone(first)
    assert all(same(first[0], each) for each in (*first, *again))


def test_two_dimensions_train_as_one_worker(four: Run) -> None:
    results = four(train_2d)

    assert_as_alone(results, outputs=8)
    assert all(same(results[0], each) for each in results)
