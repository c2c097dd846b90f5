"""Whether transformers and accelerate are there, and in versions that are known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from craft.adapters.requirements import check, check_version
from craft.protocol.errors import ConfigError


def test_what_is_installed_is_known() -> None:
    check("transformers", "accelerate")


@pytest.mark.parametrize("version", ["4.57.6", "5.21.1", "6.0.0", "main"])
def test_another_version_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"transformers {version} is installed.*craft\[huggingface\]"):
        check_version("transformers", version)


MISSING = """
import importlib.metadata
version = importlib.metadata.version
def missing(name):
    if name == "accelerate":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = missing
try:
    import craft.adapters.huggingface
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_one_of_the_packages_a_sentence_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ConfigError accelerate is not installed: pip install 'craft[huggingface]'\n"
