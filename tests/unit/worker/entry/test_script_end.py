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
from craft.worker.entry.script_end import exit_with_refusal_code, real_error, script_traceback, summary


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
    assert summary(raised) == "ValueError: the learning rate is negative (the script then exited with code 1)"
    assert script_traceback(raised).endswith("ValueError: the learning rate is negative\n")


def test_the_error_behind_the_exit_of_click() -> None:
    @click.command()
    def main() -> None:
        raise click.ClickException("there is no data set")

    raised = ended(lambda: main([]))
    assert isinstance(raised, SystemExit)
    assert summary(raised).startswith("click.exceptions.ClickException: there is no data set (the script then exited")


def test_the_error_behind_the_exit_of_argparse() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    raised = ended(lambda: parser.parse_args(["--lr", "fast"]))
    assert "invalid float value: 'fast' (the script then exited with code 2)" in summary(raised)


def exits(code: object, behind: BaseException | None = None) -> None:
    try:
        raise behind or ValueError("behind it")
    except BaseException:  # noqa: BLE001
        sys.exit(code)  # type: ignore[arg-type]


def test_an_exit_with_a_message_or_without_a_cause_speaks_for_itself() -> None:
    assert summary(ended(lambda: exits("no data"))) == "SystemExit: no data"
    assert summary(ended(lambda: sys.exit(7))) == "SystemExit: 7"
    assert summary(SystemExit(1)) == "SystemExit: 1"


def test_an_exit_that_says_from_where_it_comes() -> None:
    def hides() -> None:
        try:
            raise ValueError("not of interest")
        except ValueError:
            raise SystemExit(1) from None

    def names() -> None:
        raise SystemExit(1) from KeyError("lr")

    assert summary(ended(hides)) == "SystemExit: 1"
    assert summary(ended(names)) == "KeyError: 'lr' (the script then exited with code 1)"


def test_an_error_of_crafts_own_is_found_behind_an_exit() -> None:
    raised = ended(lambda: exits(1, Refused("started with the wrong option")))
    assert isinstance(real_error(raised), Refused)
    assert summary(raised) == "started with the wrong option"


def test_outside_of_craft_run_a_refusal_exits_with_2_and_another_error_as_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    exit_with_refusal_code()
    refusal, bug = Refused("no data"), ValueError("a bug")

    sys.excepthook(ValueError, bug, None)
    with pytest.raises(SystemExit) as raised:
        sys.excepthook(Refused, refusal, None)

    assert raised.value.code == 2 and printed == [bug, refusal]
