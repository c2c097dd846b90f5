"""Which versions of nvidia-resiliency-ext are taken."""

from __future__ import annotations

import pytest

from craft.adapters.requirements import check, check_version
from craft.protocol.errors import ConfigError


def test_the_version_that_is_installed_is_taken() -> None:
    check("nvidia-resiliency-ext")


@pytest.mark.parametrize("version", ["0.3.0", "0.5.0", "1.0"])
def test_another_version_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"{version} is installed.*pip install 'craft\[nvrx\]'"):
        check_version("nvidia-resiliency-ext", version)
