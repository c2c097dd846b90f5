"""The reference of craft.toml, which is made from the code."""

from __future__ import annotations

import os
from pathlib import Path

from craft.decide.techniques import BUILT_IN
from craft.settings.schema import reference, schema

PAGE = Path(__file__).resolve().parents[3] / "docs" / "craft_toml.md"
BELOW = "What is below is made from the code; a test compares it.\n\n"


def test_the_page_lists_every_table_and_key_as_they_are() -> None:
    """``REWRITE=1 pytest`` makes it anew."""
    head, below, _ = PAGE.read_text().partition(BELOW)
    if os.environ.get("REWRITE"):
        PAGE.write_text(head + below + reference())
    assert PAGE.read_text() == head + BELOW + reference()


def test_every_setting_has_a_description_and_a_place_in_the_schema() -> None:
    tables = schema()["properties"]["techniques"]["properties"]
    for kind in BUILT_IN:
        for name, each in tables[kind.name]["properties"].items():
            assert each["description"].endswith("."), f"{kind.name}.{name}"
    run = schema()["properties"]["run"]["properties"]
    assert all("description" in each for each in run.values())
    assert {flag for kind in BUILT_IN for flag in kind.flags} <= set(run)
