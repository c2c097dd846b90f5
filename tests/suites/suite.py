"""The foreign test suites: what runs, where, and which plugin puts CRAFT in the place of the framework's own class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """The tests of one framework."""

    name: str
    variable: str
    """The variable of ``make suites`` that names the folder with the tests."""
    plugin: str
    """In ``plugins/``; puts CRAFT in the place of the framework's own class before the tests are imported."""
    patterns: tuple[str, ...]
    """Files with tests, in that folder."""
    ups: int
    """How many folders above it pytest starts in, so that the tests' own imports work."""
    max_refused: float
    """The part of the tests that may be refused."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Of those, files (``trainer/test_x.py``) and tests (``trainer/test_x.py::test_y``) that CRAFT cannot share, and why not."""
    setting: str | None = None
    """A plugin for both sides, without which most tests could not run on this machine."""
    starts_processes: bool = False
    """Whether its tests start processes that are to have the plugin, too."""

    def files(self, folder: Path) -> list[Path]:
        """All files with tests, sorted."""
        found = {file for pattern in self.patterns for file in folder.glob(pattern)}
        return sorted(found - {folder / name for name in self.left_out})


SUITES = (
    Suite(
        name="huggingface",
        variable="HF_TESTS",
        plugin="suite_huggingface",
        patterns=("trainer/test_trainer*.py",),
        ups=1,
        max_refused=0.02,
    ),
    Suite(
        name="lightning",
        variable="LIGHTNING_TESTS",
        plugin="suite_lightning",
        patterns=("trainer/**/test_*.py", "loops/**/test_*.py", "callbacks/**/test_*.py", "models/**/test_*.py"),
        left_out={
            "trainer/connectors/test_accelerator_connector.py": "its subject is which strategy Lightning chooses",
            "trainer/test_trainer.py::test_trainer_config_strategy[trainer_kwargs0-SingleDeviceStrategy-CPUAccelerator-1]": (
                "its subject is the class of Lightning's default strategy"
            ),
            "trainer/test_trainer.py::test_train_loop_system": (
                "its subject is that Lightning enters optimizer.step before training_step, through a closure; with CRAFT"
                " the update comes after all microbatches"
            ),
        },
        ups=1,
        max_refused=0.08,
    ),
    Suite(
        name="dcp",
        variable="DCP_TESTS",
        plugin="suite_dcp",
        patterns=("test_*.py", "e2e/test_*.py", "fsdp/test_*.py"),
        ups=0,
        max_refused=0.0,
        setting="suite_torch",
        starts_processes=True,
    ),
)
