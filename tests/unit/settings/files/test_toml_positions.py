"""Where in a craft.toml a key is, however it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from craft.settings.files.toml_file import TomlFile

HANG = "techniques.hang"


@pytest.mark.parametrize(
    ("text", "table", "key", "line"),
    [
        ("[run]\n# a word\nworkers = 1\nthreads = 2", "run", "threads", 4),
        ("[run]\nworkers = 1", "run", "threads", 1),
        ("run.workers = 1\nrun.threads = 1", "run", "threads", 2),
        ("\n[techniques]\nhang . 'limit_s' = 3", HANG, "limit_s", 3),
        ("[techniques]\norder = [\n  'hang', # ]\n  'loss',\n]\nhang = { factor = 3, limit_s = 3 }", HANG, "limit_s", 6),
        ('[run]\nhost = """\n[techniques.hang]\nlimit_s = 1\n"""\n[techniques.hang]\nlimit_s = 1', HANG, "limit_s", 7),
        ("[run]\nhost = '''a\n[techniques.hang]'''\n[techniques.hang]\n", HANG, None, 4),
        ('[run]\nhost = """a\\"""\n[run]\n"""\nthreads = 1', "run", "threads", 5),
        ("[run]\nhost = '[run]#' # [techniques.hang]\nport = 1", "run", "port", 3),
        ('[ techniques . "hang" ] # one\nlimit_s = 1', HANG, "limit_s", 2),
        ("[run]\r\nworkers = 1\r\nport = 2\r\n", "run", "port", 3),
        ("[run]\nport = 1", HANG, "limit_s", None),
    ],
)  # fmt: skip
def test_a_key_has_its_line(tmp_path: Path, text: str, table: str, key: str | None, line: int | None) -> None:
    path = tmp_path / "craft.toml"
    path.write_bytes(text.encode())
    assert TomlFile(path).line(table, key) == line


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[[alerts]]\nanswer = 1\n[[alerts]]\n\nanswer = 2", [2, 5]),
        ("[[alerts]]\nanswer = 1\n[alerts.match]\na = 'b'\n[[alerts]]\n[alerts.match]\n", [2, 5]),
        ("alerts = [\n  { answer = 1 },\n  { match = {}, answer = 2 },\n]", [2, 3]),
    ],
)
def test_a_key_of_each_table_of_a_list_has_its_line(tmp_path: Path, text: str, lines: list[int]) -> None:
    path = tmp_path / "craft.toml"
    path.write_text(text)
    document = TomlFile(path)
    assert [document.line("alerts", "answer", number=number) for number in (1, 2)] == lines
