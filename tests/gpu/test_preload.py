"""Modules that the fork server imports once for all workers, and that look for a GPU themselves."""

from __future__ import annotations

import os
from pathlib import Path

from tests.integration.jobs import Jobs, describe

LOOKS = "import torch\nDEVICE = 'cuda' if torch.cuda.is_available() and torch.cuda.device_count() else 'cpu'\n"


def test_a_module_that_looks_for_gpus_leaves_them_to_the_workers(jobs: Jobs, tmp_path: Path) -> None:
    """After a question to CUDA itself, a process that was forked could not use it."""
    (tmp_path / "looks.py").write_text(LOOKS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = jobs.run(workers=2, environment={"PYTHONPATH": path, "CRAFT_PRELOAD": "looks"})
    assert result.exit_code == 0, describe(result)
    logs = [log.read_text() for log in result.run_dir.glob("workers/*/log")]
    assert len(logs) == 2 and all("trains on cuda:0" in log for log in logs), describe(result)
