"""What a client says of an address that is none."""

from __future__ import annotations

import pytest

from craft.protocol.errors import ConfigError
from craft.wire.client import Client


@pytest.mark.parametrize("url", ["", "node1:29400", "ftp://node1", "http://", "http://node1:99999", "http://[::1"])
def test_what_is_no_url_is_refused_with_its_reason(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a lighthouse's URL: "):
        Client(url, "token")
