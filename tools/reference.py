"""Write the reference pages in docs/reference from the code.

    python tools/reference.py             # write cli.md, settings.md, http.md, python.md and modules.md
    python tools/reference.py --check     # exit with code 1 if one of them is out of date

The command line comes from click, the settings from their schema, HTTP from the OpenAPI document of the lighthouse, and
Python from the docstrings (``reference_python.py``). Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from craft.cli.main import main as command_line
from craft.control.http.openapi import description
from craft.settings.schema import reference as settings_tables
from reference_python import modules_page, python_page

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- Made by tools/reference.py: change the code, then run it. -->"
Json = dict[str, Any]
_SAID_DEFAULT = re.compile(r"\s*\[default: ([^\]]*)\]")

SETTINGS = """# Settings: craft.toml

`craft run --config craft.toml` and `craft lighthouse --config craft.toml` read this file. A flag wins over a `CRAFT_*`
variable, that over craft.toml, that over the default. Each key of `[run]` is `CRAFT_KEY` in the environment; so is a
setting of a technique whose row names a key of `[run]`. `--set NAME.KEY=VALUE` sets any setting of a technique. The run
directory gets a `config.toml` with the values in force and where each comes from.

A limit of `hang` may be `inf`: then it is never reached. `craft techniques --schema` prints a JSON schema of the whole
file, with the techniques of other installed packages. [Alerts](../howto/alerts.md) describes `[[alerts]]` and
`[hooks.NAME]`.
"""

CLI = """# Command line

Every command answers `--help` with an example. `--dir` defaults to the newest `craft-run*` in the current directory.
[Run a job](../howto/run_a_job.md) explains the options that matter most, and the exit codes.
"""

HTTP = """# HTTP

What the lighthouse serves, from its own OpenAPI document (`GET /openapi.json`). Every request needs
`Authorization: Bearer TOKEN`, except where a row says otherwise. [Use the HTTP interface](../howto/http_api.md) has
examples, TLS and the metrics; agents use one more path, the WebSocket `/v1/agent`.
"""


def cli_page() -> str:
    """Return one section for each command, from click."""
    context = click.Context(command_line, info_name="craft")
    lines = [CLI, "| command | |", "|---|---|"]
    sections: list[str] = []
    for name in command_line.list_commands(context):
        command = command_line.get_command(context, name)
        assert command is not None
        lines.append(f"| [`craft {name}`](#craft-{name}) | {_summary(command)} |")
        sections += _command(command, f"craft {name}", context)
    return "\n".join([*lines, "", *sections])


def _command(command: click.Command, path: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent)
    yield from (f"## {path}", "", *_help(command.help or ""))
    usage = " ".join(command.collect_usage_pieces(context))
    yield from ("```", f"{path} {usage}".rstrip(), "```", "")
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    if options:
        yield from ("| option | default | |", "|---|---|---|")
        yield from (_option(each, context) for each in options)
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, f"{path} {name}", context)


def _help(text: str) -> Iterator[str]:
    """The help of a command: paragraphs, and what click is told not to wrap as a block of code."""
    for part in text.replace("\f", "").strip().split("\n\n"):
        lines = part.strip("\n").split("\n")
        if lines[0].strip() == "\b":
            body = [each.rstrip() for each in lines[1:]]
            if body and body[0].endswith(":"):
                yield from (body.pop(0).strip(), "")
            indent = min((len(each) - len(each.lstrip()) for each in body if each.strip()), default=0)
            yield from ("```", *(each[indent:] for each in body), "```", "")
        else:
            yield from (_cell(" ".join(each.strip() for each in lines)), "")


def _summary(command: click.Command) -> str:
    return _cell(command.get_short_help_str(limit=200))


def _option(option: click.Option, context: click.Context) -> str:
    names = ", ".join(option.opts) + ("".join(f" / {each}" for each in option.secondary_opts))
    kind = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    default, text = option.default, option.help or ""
    shown = f"`{default}`" if isinstance(default, str | int | float) and default != "" and not option.is_flag else ""
    if (found := _SAID_DEFAULT.search(text)) is not None:
        shown, text = found[1], text.replace(found[0], "")
    required = " Needed." if option.required else ""
    escaped = f"{names}{kind}".replace("|", "\\|")
    return f"| `{escaped}` | {_cell(shown)} | {_cell(text)}{required} |"


def settings_page() -> str:
    """Return one table for each table of craft.toml."""
    return f"{SETTINGS}\n{settings_tables().replace('### `', '## `')}"


def http_page() -> str:
    """Return one section for each path, then one for each type."""
    document = description()
    lines = [HTTP, "| request | | token |", "|---|---|---|"]
    sections: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"{method.upper()} {path}"
            token = "no" if operation.get("security") == [] else "yes"
            lines.append(f"| `{title}` | {_cell(operation['summary'])} | {token} |")
            sections += _operation(title, operation)
    lines += ["", *sections, "## Types", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _type(name, schema)
    return "\n".join(lines)


def _operation(title: str, operation: Json) -> Iterator[str]:
    yield from (f"## {title}", "", operation["summary"], "")
    parameters = operation.get("parameters", [])
    if parameters:
        yield from ("| parameter | in | values |", "|---|---|---|")
        for each in parameters:
            yield f"| `{each['name']}` | {each['in']} | {_values(each['schema'])} |"
        yield ""
    body = operation.get("requestBody", {}).get("content", {})
    for mime, each in body.items():
        yield from (f"Body: `{mime}`, {_values(each['schema'])}.", "")
    yield from ("| status | | body |", "|---|---|---|")
    for status, answer in sorted(operation["responses"].items()):
        content = answer.get("content", {})
        what = ", ".join(
            _values(each["schema"]) if each.get("schema") else f"`{mime}`" for mime, each in content.items()
        )
        yield f"| {status} | {_cell(answer['description'])} | {what} |"
    yield ""


def _type(name: str, schema: Json) -> Iterator[str]:
    yield from (f"### {name}", "")
    if "description" in schema:
        yield from (schema["description"], "")
    needed = set(schema.get("required", ()))
    if schema.get("properties"):
        yield from ("| field | values | default |", "|---|---|---|")
    for field, each in schema.get("properties", {}).items():
        default = "needed" if field in needed else f"`{json.dumps(each['default'])}`" if "default" in each else ""
        yield f"| `{field}` | {_values(each)} | {default} |"
    if "enum" in schema:
        yield _values(schema)
    yield ""


def _values(schema: Json) -> str:
    """What a schema allows, in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_values(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" and "items" in schema:
        return f"list of {_values(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_values(schema['additionalProperties'])}"
    limits = [
        f"{words} {schema[key]}"
        for key, words in (
            ("minimum", "at least"), ("exclusiveMinimum", "more than"), ("maximum", "at most"),
            ("minLength", "length at least"), ("maxLength", "length at most"), ("maxItems", "at most"),
        )
        if key in schema
    ]  # fmt: skip
    return ", ".join([kind if isinstance(kind, str) else " or ".join(kind), *limits])


def _cell(text: str) -> str:
    """Text that neither ends a table's cell nor begins an HTML tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "settings.md": settings_page,
    "http.md": http_page,
    "python.md": python_page,
    "modules.md": modules_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a page is out of date")
    check = parser.parse_args().check
    old = []
    for name, make in PAGES.items():
        page, text = FOLDER / name, f"{MADE}\n{make().rstrip()}\n"
        if page.exists() and page.read_text() == text:
            continue
        old.append(page.relative_to(ROOT))
        if not check:
            page.write_text(text)
    for each in old:
        print(f"{each}: out of date; run python tools/reference.py" if check else f"{each}: written")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
