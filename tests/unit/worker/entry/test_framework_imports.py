"""An adapter comes with its framework, and not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ARRIVES = """
import sys
sys.path.insert(0, {folder!r})
from craft.worker.entry import framework_imports
framework_imports.ADAPTERS["framework.inner"] = "its_adapter"
framework_imports.await_frameworks()
import json
print("its_adapter" in sys.modules)
import framework
print("its_adapter" in sys.modules)
import framework.inner
print(framework.inner.seen, framework.inner.__spec__.name)
"""

IS_THERE = """
import sys
sys.path.insert(0, {folder!r})
import framework.inner
from craft.worker.entry import framework_imports
framework_imports.ADAPTERS["framework.inner"] = "its_adapter"
framework_imports.await_frameworks()
print(framework.inner.seen)
"""


def printed(code: str, tmp_path: Path) -> list[str]:
    """What a process prints that finds a framework and its adapter in ``tmp_path``."""
    (tmp_path / "framework").mkdir()
    (tmp_path / "framework" / "__init__.py").write_text("")
    (tmp_path / "framework" / "inner.py").write_text("ready = True")
    (tmp_path / "its_adapter.py").write_text(
        "import sys\ndef register(name):\n    module = sys.modules[name]\n    assert module.ready\n    module.seen = 'seen'"
    )
    command = [sys.executable, "-c", code.format(folder=str(tmp_path))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def test_an_adapter_is_imported_right_after_what_it_adapts(tmp_path: Path) -> None:
    assert printed(ARRIVES, tmp_path) == ["False", "False", "seen", "framework.inner"]


def test_an_adapter_of_what_was_imported_before_the_script_is_there_at_once(tmp_path: Path) -> None:
    assert printed(IS_THERE, tmp_path) == ["seen"]
