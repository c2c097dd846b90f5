"""Let pages in docs/ link to files elsewhere in the repository: a hook of mkdocs.

mkdocs knows only docs/. For each relative link that leads out of it, the hook adds the file to the site under
``repository/`` and points the link there. A link to a folder becomes plain text. A link to nothing stays as it is, and
``mkdocs build --strict`` fails.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
COPIES = "repository"
_LINK = re.compile(r"(?P<text>\[[^\]]*\])\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to, and those that these link to."""
    waiting = [each.src_uri for each in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        text = (ROOT / _source(page)).read_text()
        for path in _outside(page, text):
            uri = f"{COPIES}/{path}"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
                if path.endswith(".md"):
                    waiting.append(uri)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that lead out of docs/ to the copies."""
    here = page.file.src_uri

    def rewrite(match: re.Match[str]) -> str:
        path = _resolve(here, match["target"])
        if not (ROOT / path).exists() or (_is_page(path) and not here.startswith(f"{COPIES}/")):
            return match[0]
        if (ROOT / path).is_dir():
            return match["text"][1:-1]
        uri = posixpath.relpath(path, DOCS) if _is_page(path) else f"{COPIES}/{path}"
        return f"{match['text']}({posixpath.relpath(uri, posixpath.dirname(here))}{match['anchor'] or ''})"

    return _LINK.sub(rewrite, markdown)


def _outside(page: str, text: str) -> Iterator[str]:
    for match in _LINK.finditer(text):
        path = _resolve(page, match["target"])
        if (ROOT / path).is_file() and not _is_page(path):
            yield path


def _resolve(page: str, target: str) -> str:
    """The path from the root of the repository that a link on a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_source(page)), target))


def _source(page: str) -> str:
    """The path of a page from the root of the repository."""
    return page.removeprefix(f"{COPIES}/") if page.startswith(f"{COPIES}/") else f"{DOCS}/{page}"


def _is_page(path: str) -> bool:
    return path.startswith(f"{DOCS}/")
