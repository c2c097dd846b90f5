"""A job of two hosts under faults of every kind, again and again: it ends with the bits of an undisturbed one (P1 to P3).

    SOAK_MINUTES=30 SOAK_SEED=1 SOAK_EVERY_S=5 pytest tests/chaos -s

With ``SOAK_DIR`` the files stay there; ``resources.json`` has what every process used, second by second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.jobs import Jobs, describe

from craft.testing.history import check

from .soak import SCRIPT, Soak

MINUTES = float(os.environ.get("SOAK_MINUTES", "0.5"))
EVERY_S = float(os.environ.get("SOAK_EVERY_S", "5"))
"""Mean time between two faults."""
SEED = int(os.environ.get("SOAK_SEED", "7"))


@pytest.fixture
def soak(tmp_path: Path) -> Iterator[Soak]:
    folder = Path(os.environ.get("SOAK_DIR", tmp_path)) / "soak"
    folder.mkdir(parents=True)
    soak = Soak(folder)
    yield soak
    soak.close()


@pytest.mark.timeout(60 * MINUTES * 1.5 + 300)
def test_faults_of_every_kind_change_no_bit_and_leave_nothing_behind_P1_P2_P3(soak: Soak) -> None:
    soak.begin()
    said = soak.torment(SEED, 60 * MINUTES, EVERY_S)
    print(said)
    soak.recover()
    for host, result in soak.stop().items():
        assert result.exit_code == 0, f"host {host}{describe(result)}{soak.tell()}"
    report = check(soak.run_dir, None, soak.run_dirs)
    assert report.violations == (), "\n".join(report.violations) + soak.tell()
    reference = Jobs(soak.folder / "reference").run(SCRIPT, "--steps", str(report.steps), workers=1, limit_s=1200)
    assert reference.exit_code == 0, describe(reference)
    assert report.digest == reference.digest, f"P1: {report.steps} steps{soak.tell()}"
    print(f"{report.steps} steps, {len(soak.events('FaultInjected'))} faults, digest {report.digest}")
    print(soak.resources.summary())
    assert soak.resources.grown() == []
