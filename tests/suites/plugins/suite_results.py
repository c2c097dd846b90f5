"""pytest plugin: writes one line of JSON per test, and ends the process of a test that takes too long.

Loaded by ``tests.suites.run`` into a foreign test suite, with pytest-xdist: the tests run in a process that xdist replaces
when it dies. The controller writes the lines.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

REFUSED = "craft_refused"
_LIMIT_S = float(os.environ.get("SUITE_TEST_LIMIT_S", "300"))
_LINE_CHARS = 400
_TOLD = re.compile(r"craft\.protocol\.errors\.(?:ConfigError|Refused): (.+)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """End this process if the test takes longer than the limit; the watching thread is no Python thread."""
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True, file=2)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Note the sentence if CRAFT refused what the test asks for."""
    report = yield
    if report.failed and call.excinfo is not None and (sentence := _refusal(call.excinfo.value)) is not None:
        report.user_properties.append((REFUSED, sentence))
    return report


def _refusal(error: BaseException) -> str | None:
    """The message of the ConfigError in a chain of errors, or in the text of one that tells of another process."""
    errors = sys.modules.get("craft.protocol.errors")
    if errors is None:
        return None
    for each in _chain(error, set()):
        if isinstance(each, errors.ConfigError):
            return str(each)
        if (told := _TOLD.search(str(each))) is not None:
            return told[1]
    return None


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if error.__cause__ is not None:
            yield from _chain(error.__cause__, seen)
        error = error.__context__


class Writer:
    """Puts the phases of each test together, and writes its outcome when it is over."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w")
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(
            report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "why": ""}
        )
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.failed and test["outcome"] not in ("failed", "refused"):
            sentence = dict(report.user_properties).get(REFUSED)
            test["outcome"] = "failed" if sentence is None else "refused"
            test["why"] = str(sentence) if sentence is not None else _last_line(report)
        elif report.skipped and test["outcome"] == "passed":
            test["outcome"] = "failed" if hasattr(report, "wasxfail") else "skipped"
            test["why"] = _last_line(report)
        if report.when not in ("setup", "call"):
            # After its teardown, or where its process died.
            self._write(self._tests.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "why": _last_line(report)})

    def _write(self, test: dict[str, Any]) -> None:
        self._file.write(json.dumps(test) + "\n")
        self._file.flush()

    def pytest_unconfigure(self) -> None:
        for test in self._tests.values():
            self._write(test)
        self._file.close()


def _last_line(report: Any) -> str:
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2])[:_LINE_CHARS]
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip()[:_LINE_CHARS]
    lines = str(longrepr).strip().splitlines()
    return lines[-1][:_LINE_CHARS] if lines else ""


def pytest_configure(config: pytest.Config) -> None:
    file = os.environ.get("SUITE_RESULTS")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(file)), "suite-results-writer")
