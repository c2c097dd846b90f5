"""Pages look the same on a code host and on the site."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


convert = _load("site_markdown").convert


def test_what_belongs_to_an_item_is_indented_by_four_spaces() -> None:
    # The blank line behind the table ends it.
    page = "1. one:\n\n   | a | b |\n   |---|---|\n2. two:\n   - inner\n     goes on\n"
    assert convert(page) == "1. one:\n\n    | a | b |\n    |---|---|\n\n2. two:\n    - inner\n        goes on\n"


def test_a_list_below_a_paragraph_gets_a_blank_line() -> None:
    assert convert("Text:\n- one\n- two\n") == "Text:\n\n- one\n- two\n"
    assert convert("- one\n  goes on\n- two\n") == "- one\n    goes on\n- two\n"


def test_code_keeps_its_shape() -> None:
    page = "- item\n\n  ```\n  a\n    b\n  - c\n  ```\n\n```\n- d\n  e\n```\n"
    assert convert(page) == "- item\n\n    ```\n    a\n      b\n    - c\n    ```\n\n```\n- d\n  e\n```\n"


def test_pipes_in_code_of_a_table_lose_their_backslash() -> None:
    assert convert("| `a\\|b` | c\\|d |") == "| `a|b` | c\\|d |"
