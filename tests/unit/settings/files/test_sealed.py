"""A file with a flipped bit is found to be damaged, or says the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from craft.protocol.errors import ConfigError
from craft.settings.files.effective_file import spare_of, undamaged
from craft.settings.files.sealed import Damaged, is_sealed, is_sealed_toml, seal, seal_toml
from craft.settings.run import for_lighthouse, read_effective, resolve, write_effective
from craft.settings.techniques import Wishes


def flipped(data: bytes) -> Iterator[bytes]:
    for position, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[position] ^= 1 << bit
        yield bytes(changed)


def test_a_record_keeps_its_keys_and_values() -> None:
    record = {"a": [1, {"b": "}"}], "c": None}
    data = seal(json.dumps(record).encode())
    found = json.loads(data)
    assert is_sealed(data) and is_sealed(data.ljust(1000) + b"\n")
    assert len(found.pop("checksum")) == 32 and found == record
    assert not is_sealed(json.dumps(record).encode()), "as earlier versions wrote it"


@pytest.mark.parametrize(
    ("data", "look"), [(seal(b'{"a":[1,{"b":"}"}],"c":2}'), is_sealed), (seal_toml('[run]\na = 1\nb = "x"\n'), is_sealed_toml)]
)  # fmt: skip
def test_no_flipped_bit_leaves_a_file_sealed(data: bytes, look: type[bool]) -> None:
    for changed in flipped(data):
        try:
            assert not look(changed)
        except Damaged:
            continue


def test_a_lighthouse_reads_the_spare_copy_of_damaged_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "config.toml"
    write_effective(
        path, resolve({"script": "x", "as_module": True, "workers": 2, "on_loss": "wait", "max_restarts": 3}, None)
    )
    settings, good = read_effective(path), path.read_bytes()
    path.write_bytes(good.replace(b"wait", b"waht"))
    assert undamaged(path) == spare_of(path) and read_effective(undamaged(path)) == settings
    chosen = for_lighthouse({}, path, Wishes((), (), ()), effective=True)
    assert "reads its spare copy" in caplog.text and chosen.by_name["loss"].settings.answer == "wait"
    spare_of(path).write_bytes(b"")
    with pytest.raises(ConfigError, match="and its spare copy"):
        undamaged(path)
    spare_of(path).unlink()
    assert undamaged(path) == path, "as earlier versions left it"
