"""What people and programs rely on is what it was: golden files, which only a change of a promise changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .describe import Json
from .surface import SURFACES

GOLDEN = Path(__file__).parent / "golden"


def encoded(value: Json) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("name", SURFACES)
def test_it_is_as_it_was(name: str) -> None:
    found = encoded(SURFACES[name]())
    expected = (GOLDEN / f"{name}.json").read_text()
    assert found == expected, (
        f"the contract {name!r} has changed. If that is meant, say it in CHANGELOG.md and run: python -m tests.contracts"
    )


def test_there_is_no_golden_file_without_a_contract() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(SURFACES)
