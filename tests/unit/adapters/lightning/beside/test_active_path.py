"""Which checkpoint a fit beside Lightning's own strategies goes on from."""

from __future__ import annotations

from pathlib import Path

from craft.adapters.lightning.beside.active_path import newest


def test_the_newest_is_the_one_with_the_most_steps(tmp_path: Path) -> None:
    for name in ("step=9.ckpt", "step=30.ckpt", "step=100.ckpt.part", "step=x.ckpt", "last.ckpt"):
        (tmp_path / name).touch()
    assert newest(str(tmp_path)) == str(tmp_path / "step=30.ckpt")


def test_without_any_a_fit_begins_anew(tmp_path: Path) -> None:
    assert newest(str(tmp_path)) is None
    assert newest(str(tmp_path / "missing")) is None
