"""The error that ended a script is named, also where hydra or click made an exit code of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import click
import hydra
import pytest

from craft.protocol.errors import Refused
from craft.worker.entry.script_errors import real_error, sentence, story


def ended(script: Callable[[], object]) -> BaseException:
    try:
        script()
    except BaseException as error:  # noqa: BLE001  (what ends a script is what is looked at)
        return error
    raise AssertionError("the script did not end by an exception")


def test_the_error_behind_the_exit_of_hydra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "hydra.run.dir=.", "hydra.output_subdir=null"])

    @hydra.main(version_base=None)
    def main(config: object) -> None:
        raise ValueError("the learning rate is negative")

    raised = ended(main)
    assert isinstance(raised, SystemExit)
    assert sentence(raised) == "ValueError: the learning rate is negative (the script then exited with code 1)"
    assert story(raised).endswith("ValueError: the learning rate is negative\n")


def test_the_error_behind_the_exit_of_click() -> None:
    @click.command()
    def main() -> None:
        raise click.ClickException("there is no data set")

    raised = ended(lambda: main([]))
    assert isinstance(raised, SystemExit)
    assert sentence(raised).startswith("click.exceptions.ClickException: there is no data set (the script then exited")


def test_the_error_behind_the_exit_of_argparse() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    raised = ended(lambda: parser.parse_args(["--lr", "fast"]))
    assert "invalid float value: 'fast' (the script then exited with code 2)" in sentence(raised)


def exits(code: object, behind: BaseException | None = None) -> None:
    try:
        raise behind or ValueError("behind it")
    except BaseException:  # noqa: BLE001
        sys.exit(code)  # type: ignore[arg-type]


def test_an_exit_with_a_message_or_without_a_cause_speaks_for_itself() -> None:
    assert sentence(ended(lambda: exits("no data"))) == "SystemExit: no data"
    assert sentence(ended(lambda: sys.exit(7))) == "SystemExit: 7"
    assert sentence(SystemExit(1)) == "SystemExit: 1"


def test_an_exit_that_says_from_where_it_comes() -> None:
    def hides() -> None:
        try:
            raise ValueError("not of interest")
        except ValueError:
            raise SystemExit(1) from None

    def names() -> None:
        raise SystemExit(1) from KeyError("lr")

    assert sentence(ended(hides)) == "SystemExit: 1"
    assert sentence(ended(names)) == "KeyError: 'lr' (the script then exited with code 1)"


def test_an_error_of_crafts_own_is_found_behind_an_exit() -> None:
    raised = ended(lambda: exits(1, Refused("started with the wrong option")))
    assert isinstance(real_error(raised), Refused)
    assert sentence(raised) == "started with the wrong option"
