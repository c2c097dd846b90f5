from __future__ import annotations

from pathlib import Path

import pytest

from craft.protocol.errors import ConfigError
from craft.wire.auth import accepts, bearer, ensure_token, make_token, read_token, write_token


def test_a_token_is_long_random_and_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = ensure_token(path)
    assert len(token) >= 40
    assert token != make_token()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_that_is_there_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert ensure_token(path) == ensure_token(path) == read_token(path)


def test_a_token_replaces_a_file_that_others_could_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("x")
    path.chmod(0o644)
    write_token(path, make_token())
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"has a space in the middle of it"])
def test_an_unusable_token_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="token"):
        read_token(path)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token file"):
        read_token(tmp_path / "token")


def test_only_the_right_bearer_is_accepted_P6() -> None:
    token = make_token()
    assert accepts(token, bearer(token)["Authorization"])
    assert accepts(token, f"bearer {token}")
    for header in (None, "", token, f"Basic {token}", "Bearer", "Bearer ", f"Bearer {token}x", f"Bearer {token[:-1]}"):
        assert not accepts(token, header)
    assert not accepts(token, "Bearer ünïcode \udcff")
