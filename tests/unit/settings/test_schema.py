"""The schema of craft.toml; ``make check`` compares the page that is made from it."""

from __future__ import annotations

from craft.decide.techniques import BUILT_IN
from craft.settings.schema import schema


def test_every_setting_has_a_description_and_a_place_in_the_schema() -> None:
    tables = schema()["properties"]["techniques"]["properties"]
    for kind in BUILT_IN:
        for name, each in tables[kind.name]["properties"].items():
            assert each["description"].endswith("."), f"{kind.name}.{name}"
    run = schema()["properties"]["run"]["properties"]
    assert all("description" in each for each in run.values())
    assert {flag for kind in BUILT_IN for flag in kind.flags} <= set(run)
