"""The Python reference, from the source: names of ``__all__``, their signatures and docstrings. Imports nothing of CRAFT."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFAULT = re.compile(r"^(\w+: [^=]+)=")
_ROLE = re.compile(r"``([^`]+)``")

HEAD = """# Python

The public names, from their docstrings. Names that are not here may change without notice.
"""

MODULES_HEAD = """# Modules

Every module of `src/craft`, with the first lines of its docstring. The [code map](../explanation/code_map.md) says how they
belong together.
"""

MODULES = ("craft", "craft.dcp", "craft.techniques", "craft.testing", "craft.testing.history")
"""Modules with a section; one without ``__all__`` shows its public functions and classes."""

FIRST = ("join", "Job", "Step", "attend", "Guest", "Change")
"""What a reader looks for comes first."""

NOT_CALLED = ("Attempts", "Epoch.check_iterated")
"""What loops return, and scripts only iterate over."""

ADAPTERS: dict[str, tuple[str, ...]] = {
    "craft.adapters.lightning": ("CraftStrategy", "CraftCallback"),
    "craft.adapters.huggingface": ("CraftTrainer", "CraftMixin"),
    "craft.adapters.torchft": ("attend",),
    "craft.adapters.nvrx": ("AbortGloo", "Attend", "TellHealth"),
}


def python_page() -> str:
    """Return a section for each public module, then what their methods return, events and adapters."""
    lines = [HEAD]
    for module in MODULES:
        lines += _module(module)
    lines += ["## What methods return", ""]
    for found in _returned():
        lines += _entry(found.name, found)
    lines += ["## Events", "", "`job.on(craft.events.NAME, handler)` takes these.", "", "| event | |", "|---|---|"]
    lines += [f"| `{each.name}` | {_first(each)} |" for each in _events()]
    lines += ["", "## Adapters", "", "| name | |", "|---|---|"]
    for package, names in ADAPTERS.items():
        lines += [f"| `{package}.{name}` | {_adapter(package, name)} |" for name in names]
    return "\n".join(lines)


def modules_page() -> str:
    """Return a table for each folder of src/craft: its modules, with the first line of their docstrings."""
    lines = [MODULES_HEAD]
    for folder in sorted({path.parent for path in (SOURCE / "craft").rglob("*.py")}):
        said = _docstring(folder / "__init__.py")
        lines += [f"## {folder.relative_to(SOURCE)}", "", _cell(said), ""]
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if modules:
            lines += [
                "| module | |",
                "|---|---|",
                *(f"| `{each.stem}` | {_cell(_docstring(each))} |" for each in modules),
                "",
            ]
    return "\n".join(lines)


def _docstring(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]


def _module(module: str) -> Iterator[str]:
    tree = _tree(module)
    yield from (f"## {module}", "", *_text(ast.get_docstring(tree)))
    names = _public(module)
    for name in [*(each for each in FIRST if each in names), *(each for each in names if each not in FIRST)]:
        if (home := _home(module, name)) is None:
            continue
        if (found := _find(*home)) is not None:
            yield from _entry(name, found)


def _entry(name: str, node: ast.ClassDef | Function) -> Iterator[str]:
    if not isinstance(node, ast.ClassDef):
        yield from (f"### {name}", "", *_signature(node), *_text(ast.get_docstring(node)))
        return
    yield from (f"### {name}", "", *_text(ast.get_docstring(node)))
    fields = [each for each in _fields(node) if not each[0].startswith("_")]
    if fields:
        yield from ("| field | type | |", "|---|---|---|", *(f"| `{a}` | `{b}` | {c} |" for a, b, c in fields), "")
    properties = [each for each in _methods(node) if _is_property(each)]
    if properties:
        yield from ("| property | type | |", "|---|---|---|")
        for each in properties:
            kind = _escape(ast.unparse(each.returns)) if each.returns is not None else ""
            yield f"| `{each.name}` | `{kind}` | {_first(each)} |"
        yield ""
    for each in _methods(node):
        if not _is_property(each) and f"{name}.{each.name}" not in NOT_CALLED:
            yield from (f"#### {name}.{each.name}", "", *_signature(each), *_text(ast.get_docstring(each)))


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Annotated fields of a class, each with the string below it."""
    for here, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            yield here.target.id, _escape(ast.unparse(here.annotation)), _cell(str(said))


def _methods(node: ast.ClassDef) -> list[Function]:
    return [each for each in node.body if isinstance(each, Function) and not each.name.startswith("_")]


def _is_property(node: Function) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _signature(node: Function) -> Iterator[str]:
    """The call, with one argument per line where it is long."""
    call = ast.unparse(ast.Module([_bare(node)], [])).removeprefix("async ").removeprefix("def ")
    call = call.rpartition(":\n")[0].replace("(self, ", "(").replace("(self)", "()")
    arguments, arrow, returns = call.partition("(")[2].rpartition(") -> ")
    cut = [_DEFAULT.sub(r"\1 = ", each) for each in re.split(r", (?![^\[(]*[\])])", arguments)]
    if arrow:
        call = f"{node.name}({', '.join(cut)}) -> {returns}"
    if arrow and len(call) > 100:
        call = f"{node.name}(\n    " + ",\n    ".join(cut) + f",\n) -> {returns}"
    yield from ("```python", call, "```", "")


def _bare(node: Function) -> ast.FunctionDef:
    found = ast.parse(f"def {node.name}(): ...").body[0]
    assert isinstance(found, ast.FunctionDef)
    found.args, found.returns = node.args, node.returns
    return found


def _events() -> list[ast.ClassDef]:
    trees = (_tree("craft.protocol.events"), _tree("craft.protocol.worker_events"))
    found = [each for tree in trees for each in tree.body if isinstance(each, ast.ClassDef)]
    return sorted((each for each in found if not each.name.startswith("_")), key=lambda each: each.name)


def _adapter(package: str, name: str) -> str:
    """The first sentence of the class or function, in whichever module of the package it is."""
    for path in sorted((SOURCE / package.replace(".", "/")).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | Function) and node.name == name and ast.get_docstring(node):
                return _first(node)
    raise LookupError(f"{package}.{name} has no docstring, or is not there: mend ADAPTERS in {Path(__file__).name}")


@cache
def _tree(module: str) -> ast.Module:
    path = SOURCE / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _public(module: str) -> list[str]:
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [each.name for each in _tree(module).body if isinstance(each, kinds) and not each.name.startswith("_")]


def _home(module: str, name: str, strict: bool = True) -> tuple[str, str] | None:
    """Module and name under which a name is defined; None for a module, and unless strict for a name of others."""
    if _find(module, name) is not None:
        return module, name
    imports = [each for each in ast.walk(_tree(module)) if isinstance(each, ast.ImportFrom)]
    for source in (each for each in imports if each.module and each.module.startswith("craft")):
        for alias in source.names:
            if (alias.asname or alias.name) == name:
                full = SOURCE / f"{source.module}.{alias.name}".replace(".", "/")
                if full.is_dir() or full.with_suffix(".py").exists():
                    return None
                return _home(source.module or "", alias.name)
    if not strict:
        return None
    raise LookupError(f"{module}.{name} is not found")


def _find(module: str, name: str) -> ast.ClassDef | Function | None:
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return node
    return None


def _returned() -> list[ast.ClassDef]:
    """Classes of CRAFT that methods of the public ones return or yield, and that scripts call methods of."""
    public = {_home("craft", name) for name in _public("craft")}
    waiting = [each for each in (_home("craft", "Job"), _home("craft", "Step")) if each is not None]
    seen, found = set(waiting), []
    while waiting:
        module, name = waiting.pop(0)
        node = _find(module, name)
        if not isinstance(node, ast.ClassDef):
            continue
        if (module, name) not in public and name not in NOT_CALLED and _methods(node):
            found.append(node)
        for method in (each for each in node.body if isinstance(each, Function)):
            if method.returns is not None and (method.name[0] != "_" or method.name in ("__iter__", "__next__")):
                names = {each.id for each in ast.walk(method.returns) if isinstance(each, ast.Name)}
                homes = [_home(module, each, strict=False) for each in sorted(names)]
                waiting += [each for each in homes if each is not None and each not in seen]
                seen.update(each for each in homes if each is not None)
    return found


def _text(docstring: str | None) -> Iterator[str]:
    """A docstring as Markdown: literals, and blocks of code."""
    if not docstring:
        return
    code = False
    for line in docstring.splitlines():
        if line.startswith(".. code-block::"):
            yield f"```{line.partition('::')[2].strip()}"
            code = True
        elif code and line and not line.startswith(" "):
            yield from ("```", "", _ROLE.sub(r"`\1`", line))
            code = False
        elif code:
            if line or not code:
                yield line.removeprefix("    ")
        else:
            yield line if line.startswith("    ") else _ROLE.sub(r"`\1`", line)
    if code:
        yield "```"
    yield ""


def _first(node: ast.ClassDef | Function) -> str:
    text = (ast.get_docstring(node) or "").split("\n\n")[0]
    return _cell(text)


def _cell(text: str) -> str:
    return _escape(_ROLE.sub(r"`\1`", " ".join(text.split())))


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
