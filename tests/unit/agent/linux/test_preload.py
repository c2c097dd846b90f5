"""Modules that the fork server imports once for all workers."""

from __future__ import annotations

import sys

import pytest

from craft.agent.linux.forkserver import _preload


def test_a_module_that_cannot_be_imported_is_told_of_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    _preload("no_such_module")
    assert (
        capsys.readouterr().err
        == "craft: --preload no_such_module: ModuleNotFoundError: No module named 'no_such_module'\n"
    )


def test_a_module_is_there_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    _preload("colorsys")
    assert "colorsys" in sys.modules
