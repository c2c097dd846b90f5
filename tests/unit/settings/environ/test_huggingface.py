"""A worker looks like a process alone, where accelerate looks for others."""

from __future__ import annotations

import os

import pytest

from craft.settings.environ.huggingface import alone


def test_a_workers_place_is_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "PMI_SIZE": "4"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with alone():
        assert not place.keys() & os.environ.keys()
    assert {name: os.environ.get(name) for name in (*place, "LOCAL_WORLD_SIZE")} == {**place, "LOCAL_WORLD_SIZE": None}
