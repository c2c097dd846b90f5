"""``make suites``: what a foreign test comes out as, with the framework's own class and with CRAFT's."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from tests.suites import run
from tests.suites.suite import SUITES, Suite
from tests.suites.table import BOTH, Outcome, compare, describe, judge, read_outcomes

FOREIGN = """
import os, time, pytest
from craft.protocol.errors import ConfigError

def test_that_passes(): pass
def test_that_fails(): assert 1 == 2, "one is not two"
def test_that_is_refused():
    try:
        raise ConfigError("lomo updates too early: use another one")
    except ConfigError as error:
        raise RuntimeError("wrapped") from error
def test_that_tells_of_another_process():
    raise RuntimeError("Traceback\\ncraft.protocol.errors.ConfigError: not there\\n")
def test_that_ends_its_process(): os._exit(3)
def test_that_hangs(): time.sleep(600)
def test_after_it(): pass
def test_that_is_skipped(): pytest.skip("needs a GPU")
"""


def test_every_test_of_a_file_has_an_outcome_whatever_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plugins that happen to be installed take longer to import than all of this.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_foreign.py").write_text(FOREIGN)
    suite = Suite(name="tiny", variable="TINY", plugin="suite_results", patterns=("test_*.py",), ups=1, max_refused=0)
    options = argparse.Namespace(results=tmp_path / "results", reuse="none", keyword="", limit_s=4.0)
    (file,) = suite.files(folder)
    found = read_outcomes([run._run(suite, folder, file, "own", options)])
    outcomes = {name.split("::")[1]: each for name, each in found.items()}
    assert outcomes["test_that_passes"].outcome == outcomes["test_after_it"].outcome == "passed"
    assert outcomes["test_that_fails"] == Outcome("failed", "AssertionError: one is not two\nassert 1 == 2")
    assert outcomes["test_that_is_refused"] == Outcome("refused", "lomo updates too early: use another one")
    assert outcomes["test_that_tells_of_another_process"] == Outcome("refused", "not there")
    assert outcomes["test_that_is_skipped"].outcome == "skipped"
    for name in ("test_that_ends_its_process", "test_that_hangs"):
        assert outcomes[name].outcome == "failed" and "crashed" in outcomes[name].why
    assert not list((tmp_path / "results").glob("**/*.unfinished"))


OF_TORCH = """
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

class TestOfTorch(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(2)
    def test_that_asks_for_gpus(self):
        print(self.rank)

class TestWithoutAProcess(TestOfTorch):
    world_size = 0
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_torchs_tests_that_ask_for_gpus_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_of_torch.py").write_text(OF_TORCH)
    options = argparse.Namespace(results=tmp_path / "results", reuse="none", keyword="", limit_s=100.0)
    suite = Suite("tiny", "TINY", "suite_dcp", ("test_*.py",), ups=0, max_refused=0, setting="suite_torch")
    (file,) = suite.files(tmp_path)
    found = read_outcomes([run._run(suite, tmp_path, file, "own", options)])
    outcomes = {name.split("::")[1]: each.outcome for name, each in found.items()}
    assert outcomes == {"TestOfTorch": "passed", "TestWithoutAProcess": "skipped"}, found


OWN = {"a": Outcome("passed"), "b": Outcome("passed"), "c": Outcome("passed"), "d": Outcome("failed", "no network")}


def test_only_what_passes_with_the_frameworks_own_class_counts() -> None:
    craft = {"a": Outcome("passed"), "b": Outcome("refused", "no"), "c": Outcome("skipped"), "d": Outcome("failed")}
    found = compare(OWN, craft)
    assert [found[name].outcome for name in "abcd"] == ["passed", "refused", "failed", BOTH]
    assert compare(OWN, {})["a"] == Outcome("failed", "it did not run")


def test_a_suite_is_good_if_nothing_failed_and_few_were_refused() -> None:
    craft = {"a": Outcome("passed"), "b": Outcome("refused", "leave it out"), "c": Outcome("passed")}
    assert judge("tiny", OWN, craft, 0.34, left_out={}).is_good
    assert not judge("tiny", OWN, craft, 0.33, left_out={}).is_good
    failed = judge("tiny", OWN, {**craft, "b": Outcome("failed", "ValueError: x\nmore")}, 1.0, left_out={})
    assert not failed.is_good
    text = describe([judge("tiny", OWN, craft, 0.34, left_out={}), failed])
    assert "33.3% (at most 34%) ok" in text and "NOT OK" in text
    assert (
        "tiny: refused 1 x: leave it out" in text and "tiny: FAILED b: ValueError: x\n" not in text.partition("more")[2]
    )
    assert not judge("tiny", {"d": OWN["d"]}, {}, 1.0, left_out={}).is_good


def test_what_is_left_out_counts_on_neither_side_and_is_listed_with_its_reason() -> None:
    test, variant, other = (
        "tests/one/test_x.py::test_y",
        "tests/one/test_x.py::test_y[1]",
        "tests/none/test_x.py::test_y",
    )
    own = dict.fromkeys((test, variant, other), Outcome("passed"))
    craft = {test: Outcome("failed", "as expected"), variant: Outcome("passed"), other: Outcome("passed")}
    assert list(judge("tiny", own, craft, 0, left_out={}).failures) == [test]
    verdict = judge("tiny", own, craft, 0, left_out={"one/test_x.py::test_y": "its subject is the class"})
    assert verdict.is_good and verdict.own["passed"] == verdict.counted == 2
    assert "tiny: left out: one/test_x.py::test_y: its subject is the class" in describe([verdict]).splitlines()


def test_a_file_that_is_left_out_is_not_run(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).touch()
    left_out = {"test_a.py": "its subject is the class", "test_b.py::test_c": "so is its"}
    suite = Suite("tiny", "TINY", "suite_results", ("test_*.py",), ups=0, max_refused=0, left_out=left_out)
    assert suite.files(tmp_path) == [tmp_path / "test_b.py"]


def test_everything_that_a_suite_leaves_out_has_a_reason() -> None:
    assert all(reason.strip() for suite in SUITES for reason in suite.left_out.values())
