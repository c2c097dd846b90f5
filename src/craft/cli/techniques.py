"""``craft techniques``: what there is, what is on, how it is set, and who answers what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import click

from craft.cli.explained import explained
from craft.protocol.errors import ConfigError


class _Entry(NamedTuple):
    """One technique, for people and for ``--json``."""

    name: str
    summary: str
    origin: str
    """built-in, or the package that it comes from."""
    on: bool
    optional: bool
    settings: list[dict[str, Any]]
    emits: list[str]
    answers: list[str]
    points: list[str]
    inexact: str | None


@click.command()
@click.argument("name", required=False)
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="A craft.toml: what is on with it.")
@click.option(
    "--dir",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="A run directory: what is on in that job.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--schema", "as_schema", is_flag=True, help="Print the JSON schema of craft.toml.")
@explained
def techniques(name: str | None, config: Path | None, run_dir: Path | None, as_json: bool, as_schema: bool) -> None:
    """List the techniques in the order in which their policies are asked, or show one with all its settings.

    \b
    Example:
      craft techniques
      craft techniques hang --config craft.toml
    """
    entries, broken = _entries(config, run_dir)
    if as_schema:
        click.echo(_schema())
        return
    if name is not None:
        entries = [_named(name, entries)]
    if as_json:
        click.echo(json.dumps([entry._asdict() for entry in entries], indent=2))
    elif name is not None:
        _show(entries[0])
    else:
        _list(entries, broken)


def _entries(config: Path | None, run_dir: Path | None) -> tuple[list[_Entry], list[str]]:
    """All techniques that there are, and sentences on those of other packages that cannot be loaded."""
    from craft.decide.technique import arrange
    from craft.decide.techniques import BUILT_IN
    from craft.settings.document import Document
    from craft.settings.rundir import find_run
    from craft.settings.techniques import choose, foreign, load, of_environment

    document = Document(find_run(run_dir).config if run_dir is not None else config)
    choice = choose(document, of_environment())
    kinds, origins, broken = list(BUILT_IN), {kind.name: "built-in" for kind in BUILT_IN}, []
    for entry in foreign().values():
        try:
            kinds.append(load(entry))
            origins[entry.name] = entry.dist.name if entry.dist is not None else entry.value
        except ConfigError as error:
            broken.append(str(error))
    on = choice.techniques.by_name
    arranged = arrange(kinds, list(on))
    return [_entry(kind, on.get(kind.name), origins[kind.name], choice.origins) for kind in arranged], broken


def _entry(kind: Any, found: Any, origin: str, origins: dict[str, str]) -> _Entry:
    import msgspec

    from craft.decide.techniques import Alerts

    technique = found if found is not None else kind(kind.Settings())
    settings = []
    for field in () if kind is Alerts else msgspec.structs.fields(kind.Settings):
        described = msgspec.json.schema(field.type)
        variable = next((f"CRAFT_{name.upper()}" for name, key in kind.flags.items() if key == field.name), None)
        settings.append(
            {
                "key": field.name,
                "value": msgspec.to_builtins(getattr(technique.settings, field.name)),
                "origin": origins.get(f"{kind.name}.{field.name}", "default"),
                "variable": variable,
                "description": described.get("description", ""),
            }
        )
    return _Entry(
        name=kind.name,
        summary=kind.summary,
        origin=origin,
        on=found is not None,
        optional=kind.optional,
        settings=settings,
        emits=[event.__name__ for event in kind.emits],
        answers=[event.__name__ for event in kind.answers],
        points=list(kind.points),
        inexact=technique.inexact(),
    )


def _named(name: str, entries: list[_Entry]) -> _Entry:
    from craft.settings.document import hint

    found = next((entry for entry in entries if entry.name == name), None)
    if found is None:
        raise ConfigError(f"there is no technique {name!r}{hint(name, [entry.name for entry in entries])}")
    return found


def _schema() -> str:
    from craft.settings.schema import schema

    return json.dumps(schema(), indent=2)


def _list(entries: list[_Entry], broken: list[str]) -> None:
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        standing = "on " if entry.on else "off"
        origin = "" if entry.origin == "built-in" else f" ({entry.origin})"
        click.echo(f"{entry.name:<{width}}  {standing}  {entry.summary}{origin}")
    for each in broken:
        click.echo(f"craft techniques: {each}", err=True)
    click.echo("\nPolicies are asked in this order. 'craft techniques NAME' shows one with its settings.")


def _show(entry: _Entry) -> None:
    click.echo(f"{entry.name}: {entry.summary}")
    always = "" if entry.optional else ", and cannot be switched off"
    click.echo(f"  {'on' if entry.on else 'off'}{always}; {entry.origin}")
    if entry.inexact is not None:
        click.echo(f"  not exact: {entry.inexact}")
    for heading, names in (("emits", entry.emits), ("answers", entry.answers), ("hooks at", entry.points)):
        if names:
            click.echo(f"  {heading}: {', '.join(names)}")
    if entry.settings:
        click.echo(f"\n  [techniques.{entry.name}]")
    for each in entry.settings:
        variable = f", {each['variable']}" if each["variable"] else ""
        value = "(none)" if each["value"] is None else json.dumps(each["value"])
        click.echo(f"  {each['key']} = {value}    ({each['origin']}{variable})")
        click.echo(f"      {each['description']}")
