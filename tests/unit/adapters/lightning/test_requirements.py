"""Which Lightning is there, and whether it is one that is known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from craft.adapters.requirements import check_version
from craft.protocol.errors import ConfigError


@pytest.mark.parametrize("version", ["2.4.0", "2.6.6", "2.10.1.post0"])
def test_versions_2_are_known(version: str) -> None:
    check_version("lightning.pytorch", version)


@pytest.mark.parametrize("version", ["1.9.5", "2.3.3", "3.0.0", "nightly"])
def test_another_version_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"pytorch_lightning {version} is installed.*craft\[lightning\]"):
        check_version("pytorch_lightning", version)


MISSING = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if "lightning" in name and "craft" not in name else find_spec(name, *more)
try:
    import craft.adapters.lightning
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_lightning_a_sentence_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=60, check=True)
    assert (
        "ConfigError neither lightning nor pytorch_lightning is installed: pip install 'craft[lightning]'"
        in done.stdout
    )
