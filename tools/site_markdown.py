"""Turn Markdown as code hosts read it into what mkdocs reads, so that a page looks the same in both: a hook of mkdocs.

Code hosts nest what is indented as far as the text of a list item, and begin a list right below a paragraph. mkdocs wants
four spaces for each level and a blank line. It also keeps the backslash of ``\\|`` in a code span of a table.
"""

from __future__ import annotations

import re
from typing import Any

_ITEM = re.compile(r"^( *)([-*]|\d+\.)( +)(?=\S)")
_FENCE = re.compile(r"^ *(```+|~~~+)")
_SPAN = re.compile(r"`[^`]*`")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page as mkdocs wants it."""
    return convert(markdown)


def convert(markdown: str) -> str:
    """Indent what belongs to list items by four spaces for each level, and set lists apart."""
    out: list[str] = []
    levels: list[tuple[int, int]] = []
    """Of the items that are open: where the marker begins, and where the text does."""
    fence: str | None = None
    shift = 0
    for line in markdown.split("\n"):
        if fence is not None:
            out.append(_shifted(line, shift))
            if line.strip() == fence:
                fence = None
            continue
        if not line.strip():
            out.append(line)
            continue
        indent = len(line) - len(line.lstrip(" "))
        item = _ITEM.match(line)
        while levels and indent < levels[-1][1]:
            levels.pop()
        if item is not None:
            text = out[-1].strip() if out else ""
            if not levels and text and not _in_list(out):
                out.append("")
            out.append("    " * len(levels) + line[indent:])
            levels.append((indent, item.end()))
            continue
        shift = 4 * len(levels) - (levels[-1][1] if levels else 0)
        if (found := _FENCE.match(line)) is not None:
            fence = found[1]
        out.append(_spans(_shifted(line, shift)))
    return "\n".join(out)


def _in_list(lines: list[str]) -> bool:
    """Whether the paragraph that the last line belongs to begins with an item of a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if _ITEM.match(line):
            return True
    return False


def _shifted(line: str, shift: int) -> str:
    return " " * shift + line if shift > 0 and line.strip() else line


def _spans(line: str) -> str:
    if not line.lstrip().startswith("|"):
        return line
    return _SPAN.sub(lambda match: match[0].replace("\\|", "|"), line)
