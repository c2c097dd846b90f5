from __future__ import annotations

from pathlib import Path

import pytest

from craft.protocol.errors import ConfigError
from craft.settings.torchrun import check_alone, hash_seed_warning, launched, lighthouse

OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "r1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
}
OF_JOB = {"CRAFT_LIGHTHOUSE": "http://h:1", "CRAFT_TOKEN_FILE": "token"}


def surroundings(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in (*OF_TORCHRUN, *OF_JOB, "CRAFT_SOCKET", "CRAFT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_process_of_torchrun_knows_its_place_and_its_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings(monkeypatch, **OF_TORCHRUN, **OF_JOB)
    found = launched()
    assert found is not None
    assert (found.run_id, found.local_rank, found.local_world_size, found.restarts) == ("r1", 1, 2, 2)
    assert found.lighthouse == "http://h:1"
    assert found.run_dir == Path("craft-run-torchrun-r1").absolute()


@pytest.mark.parametrize(
    "values",
    [OF_JOB, OF_TORCHRUN, {**OF_TORCHRUN, **OF_JOB, "CRAFT_SOCKET": "s"}],
    ids=["no torchrun", "no lighthouse", "an agent already"],
)
def test_others_are_not_adopted(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    surroundings(monkeypatch, **values)
    assert launched() is None


def test_a_lighthouse_without_its_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings(monkeypatch, **OF_TORCHRUN, CRAFT_LIGHTHOUSE="http://h:1")
    with pytest.raises(ConfigError, match="set CRAFT_TOKEN_FILE"):
        launched()
    with pytest.raises(ConfigError, match="CRAFT_TOKEN_FILE is not set"):
        lighthouse()


def test_several_processes_of_a_torchrun_without_a_lighthouse_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings(monkeypatch, **OF_TORCHRUN)
    with pytest.raises(ConfigError, match="each would be a separate job"):
        check_alone()
    surroundings(monkeypatch, **{**OF_TORCHRUN, "WORLD_SIZE": "1"})
    check_alone()


@pytest.mark.parametrize(("value", "warned"), [(None, True), ("", True), ("random", True), ("0", False), ("17", False)])
def test_a_hash_seed_that_is_not_fixed_is_warned_of_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, value: str | None, warned: bool
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if value is not None:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    assert ("'PYTHONHASHSEED=0 torchrun ...'" in hash_seed_warning()) == warned
