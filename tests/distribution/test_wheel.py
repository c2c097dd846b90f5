"""The wheel holds the package and nothing else, and its command answers without the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

import craft

from .wheel import ROOT, build_wheel, files_of, install, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    return build_wheel(tmp_path_factory.mktemp("build"))


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    found = {name for name in files_of(wheel) if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "craft").rglob("*.py")}
    assert found == modules | {"craft/py.typed"}


def test_command_and_package_of_the_wheel_work_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    commands = install(wheel, tmp_path)
    assert run([str(commands / "craft"), "--version"], tmp_path) == f"craft {craft.__version__}\n"
    assert "craft run --workers" in run([str(commands / "craft"), "--help"], tmp_path)
    where = run([str(commands / "python"), "-c", "import craft; print(craft.__file__)"], tmp_path)
    assert where.startswith(str(tmp_path)), "this is the wheel's, and no other"
