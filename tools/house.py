"""Measure the layout of ``src/craft`` and draw its import graph.

    python tools/house.py             # print a table for each package, and what is over a limit
    python tools/house.py --draw      # also write docs/assets/house.svg
    python tools/house.py --strict    # exit with code 1 if something is over a limit

Over a limit are large folders, files and functions, and import cycles between modules of one folder. Imports are read from
the syntax tree, lazy and type-only ones included. No module of the project is imported.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "craft"
PICTURE = ROOT / "docs" / "assets" / "house.svg"
MOST_MODULES = 12
MOST_LINES = 350
MOST_FUNCTION_LINES = 60


@dataclass
class Module:
    """One file."""

    name: str
    lines: int
    is_package: bool = False
    """Whether it is the ``__init__.py`` of a folder."""
    imports: frozenset[str] = frozenset()
    long_functions: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


@dataclass
class Package:
    """A room of the project, with all that is below it."""

    name: str
    modules: list[Module] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules)

    @property
    def longest(self) -> Module:
        return max(self.modules, key=lambda module: module.lines)

    @property
    def most_in_a_folder(self) -> tuple[str, int]:
        return sizes_of_folders(self.modules).most_common(1)[0]


def sizes_of_folders(modules: Iterable[Module]) -> Counter[str]:
    """Count the modules in each folder, without its ``__init__.py`` and its sub-folders."""
    return Counter(module.folder for module in modules if not module.is_package)


def read_modules() -> dict[str, Module]:
    """Read every file below ``src/craft``."""
    paths = {_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
    modules = {}
    for name, path in paths.items():
        text = path.read_text()
        if not text.strip() and path.name == "__init__.py":
            continue
        tree = ast.parse(text)
        modules[name] = Module(
            name=name,
            lines=text.count("\n"),
            is_package=path.name == "__init__.py",
            imports=frozenset(_imports(tree, name, paths.keys())),
            long_functions=_long(tree, name),
        )
    return modules


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, name: str, known: Collection[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {each for each in found if each in known and each != name}


def _long(tree: ast.Module, name: str) -> tuple[str, ...]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return tuple(
        f"{name}.{node.name} ({length} lines)"
        for node in functions
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_FUNCTION_LINES
    )


def packages_of(modules: dict[str, Module]) -> dict[str, Package]:
    """Group modules by the part of their name behind ``craft``."""
    found: dict[str, Package] = {}
    for module in modules.values():
        parts = module.name.split(".")
        if len(parts) > 1:
            found.setdefault(parts[1], Package(parts[1])).modules.append(module)
    return found


def room_of(name: str) -> str:
    """The package that a module belongs to."""
    return name.split(".")[1] if "." in name else ""


def edges_between(modules: dict[str, Module]) -> Counter[tuple[str, str]]:
    """How many imports lead from one package to another."""
    found: Counter[tuple[str, str]] = Counter()
    for module in modules.values():
        for target in module.imports:
            pair = (room_of(module.name), room_of(target))
            if all(pair) and pair[0] != pair[1]:
                found[pair] += 1
    return found


def layers() -> dict[str, list[str]]:
    """Return the layers of each package, top first, from the contracts of import-linter; ``a | b`` share a layer."""
    contracts = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())["tool"]["importlinter"]["contracts"]
    return {
        container: contract["layers"]
        for contract in contracts
        if contract["type"] == "layers"
        for container in contract["containers"]
    }


def rooms(packages: Collection[str]) -> list[str]:
    """Return the names of the packages, top first."""
    named = [name.strip() for layer in layers()["craft"] for name in layer.split("|")]
    return [name for name in named if name in packages]


def cycles(modules: dict[str, Module]) -> list[str]:
    """Return import cycles between modules of one folder; each as a shortest path back to its first module."""
    found: dict[frozenset[str], str] = {}
    for name in sorted(modules):
        path = _way_back(name, modules)
        if path is not None and frozenset(path) not in found:
            folder = modules[name].folder
            shown = [each.removeprefix(f"{folder}.") for each in [*path, name]]
            found[frozenset(path)] = f"{folder}: import cycle {' -> '.join(shown)}"
    return sorted(found.values())


def _way_back(name: str, modules: dict[str, Module]) -> list[str] | None:
    """Return the modules of a shortest cycle through ``name`` within its folder."""
    folder = modules[name].folder
    paths, seen = [[name]], {name}
    for path in paths:
        for target in sorted(modules[path[-1]].imports):
            if target == name:
                return path
            if target in modules and modules[target].folder == folder and target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return None


def over_limits(modules: dict[str, Module]) -> list[str]:
    """Return what is over a limit, in words."""
    found = [
        f"{name}: {count} modules in one folder (aim: {MOST_MODULES})"
        for name, count in sizes_of_folders(modules.values()).items()
        if count > MOST_MODULES
    ]
    found += [
        f"{each.name}: {each.lines} lines (aim: {MOST_LINES})" for each in modules.values() if each.lines > MOST_LINES
    ]
    found += [f"{each} (aim: {MOST_FUNCTION_LINES})" for module in modules.values() for each in module.long_functions]
    return sorted([*found, *cycles(modules)])


def table(modules: dict[str, Module]) -> str:
    """One row for each package."""
    between, order = edges_between(modules), layers()
    fans: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for source, target in between:
        fans[target][0].add(source)
        fans[source][1].add(target)
    rows = [
        (
            "package",
            "files",
            "lines",
            "longest file",
            "most in a folder",
            "imported by",
            "imports",
            "order of its parts",
        )
    ]
    packages = packages_of(modules)
    for name in rooms(packages):
        package = packages[name]
        longest, (folder, count) = package.longest, package.most_in_a_folder
        rows.append(
            (
                name,
                str(len(package.modules)),
                str(package.lines),
                f"{longest.name.removeprefix(f'craft.{name}.')} {longest.lines}",
                f"{folder.removeprefix('craft.')} {count}",
                str(len(fans[name][0])),
                str(len(fans[name][1])),
                " > ".join(order.get(f"craft.{name}", [])) or "-",
            )
        )
    rows.append(("all", str(len(modules)), str(sum(each.lines for each in modules.values())), "", "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def draw(modules: dict[str, Module]) -> str:
    """Return the import graph of the packages as SVG: each imports only what is below it."""
    packages, between = packages_of(modules), edges_between(modules)
    order = rooms(packages)
    width, height, gap, left = 220, 34, 22, 330
    places = {name: (left, 20 + row * (height + gap)) for row, name in enumerate(order)}
    parts = []
    for (source, target), count in sorted(between.items()):
        if source not in places or target not in places:
            continue
        x, y = places[source]
        _, below = places[target]
        span = order.index(target) - order.index(source)
        side = -1 if order.index(source) % 2 else 1
        start = x + width if side > 0 else x
        bend = start + side * (18 + 20 * abs(span))
        start_y, end_y = y + height // 2, below + height // 2
        parts.append(
            f'<path d="M{start} {start_y} C{bend} {start_y} {bend} {end_y} {start} {end_y}"'
            f' fill="none" stroke="#5b7083" stroke-opacity="0.45" stroke-width="{min(6.0, 0.6 + count / 25):.1f}"/>'
        )
    for name, (x, y) in places.items():
        package = packages[name]
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="#eef3f8" stroke="#34495e"/>'
        )
        parts.append(
            f'<text x="{x + 12}" y="{y + 22}" font-weight="600">{escape(name)}</text>'
            f'<text x="{x + width - 12}" y="{y + 22}" text-anchor="end" fill="#5b7083">'
            f"{len(package.modules)} files, {package.lines} lines</text>"
        )
    full = 20 + len(order) * (height + gap)
    box = f'viewBox="0 0 {2 * left + width} {full}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
    return "\n".join([head, "<title>Packages of CRAFT: imports point down only</title>", *parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draw", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if something is over a limit")
    options = parser.parse_args()
    modules = read_modules()
    print(table(modules))
    found = over_limits(modules)
    for each in found:
        print(each)
    if options.draw:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(draw(modules))
    return 1 if found and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
