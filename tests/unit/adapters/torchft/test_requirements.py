"""Which torchft CRAFT works with."""

from __future__ import annotations

import pytest

from craft.adapters.requirements import check_torchft, check_version
from craft.protocol.errors import ConfigError


def test_what_is_installed_here_is_supported() -> None:
    check_torchft()


@pytest.mark.parametrize("version", ["0.1.1", "2025.6.1", "2027.1.2", "nonsense"])
def test_another_version_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'craft\[torchft\]'"):
        check_version("torchft-nightly", version)
