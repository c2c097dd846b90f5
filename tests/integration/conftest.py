"""Fixtures of tests with real processes, and the police that finds processes left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from craft.settings.rundir import RunDir

from .hosts import LENGTH, Hosts
from .jobs import SESSION_VARIABLE, Jobs, References, leftovers
from .network import find_obstacle
from .scene import Scene
from .variants import is_variant


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_variant(item.nodeid):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Whatever was started by any test here, by whichever way, must have ended when the last test has."""
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex
    yield
    left = list(leftovers(limit_s=10))
    del os.environ[SESSION_VARIABLE]
    assert not left, "left behind: " + ", ".join(left)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts jobs, and ends them with the test."""
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.end()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """What undisturbed runs end with."""
    jobs = Jobs(tmp_path_factory.mktemp("references"))
    base = tmp_path_factory.getbasetemp()
    # Each process of pytest-xdist has a directory of its own below one of all.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references_of_all"
    shared.mkdir(exist_ok=True)
    yield References(jobs, shared)
    jobs.end()


@pytest.fixture(scope="session")
def namespaces(request: pytest.FixtureRequest) -> None:
    """Network namespaces with all that tests of several hosts do to them; without, those fail under CI and else are skipped."""
    obstacle = find_obstacle()
    if obstacle is None:
        return
    if os.environ.get("CI"):
        pytest.fail(obstacle)
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line(f"\nSKIPPED: {obstacle}", red=True, bold=True)
    pytest.skip(obstacle)


@pytest.fixture
def make_hosts(tmp_path: Path, namespaces: None) -> Iterator[Callable[..., Hosts]]:
    """Makes hosts on a network of their own, and ends all that is on them with the test."""
    made: list[Hosts] = []

    def make(*names: str, **more: Any) -> Hosts:
        made.append(Hosts(tmp_path / f"hosts{len(made)}", names, **more))
        return made[-1]

    yield make
    for hosts in made:
        hosts.end()


@pytest.fixture(scope="session")
def reference_of_hosts(references: References) -> str:
    """The final state of the job of several hosts on one host, without a namespace, with another number of workers."""
    return references.digest(*LENGTH, workers=2)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(RunDir(tmp_path / "run"))
    yield scene
    scene.end()
