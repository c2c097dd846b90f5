"""``craft techniques``: list techniques, whether they are on, their settings, and what they answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import click

from craft.cli.output.command_errors import explained
from craft.cli.output.echo import echo, echo_json
from craft.cli.output.options import FILE, FOLDER, json_option
from craft.protocol.errors import ConfigError


class _TechniqueRow(NamedTuple):
    """One technique, for people and for ``--json``."""

    name: str
    summary: str
    origin: str
    """built-in, or its package."""
    on: bool
    optional: bool
    settings: list[dict[str, Any]]
    emits: list[str]
    answers: list[str]
    points: list[str]
    inexact: str | None
    unavailable: str | None
    """Why it cannot work on this host, if so."""


@click.command()
@click.argument("name", required=False)
@click.option("--config", type=FILE, help="A craft.toml: what is on with it.")
@click.option("--dir", "run_dir", type=FOLDER, help="A run directory: what is on in that job.")
@json_option("For programs.")
@click.option("--schema", "as_schema", is_flag=True, help="Print the JSON schema of craft.toml.")
@explained
def techniques(name: str | None, config: Path | None, run_dir: Path | None, as_json: bool, as_schema: bool) -> None:
    """List the techniques in the order in which their policies are asked, or show one with all its settings.

    \b
    Example:
      craft techniques
      craft techniques hang --config craft.toml
    """
    found = _found(config, run_dir)
    if as_schema:
        from craft.settings.schema import schema

        echo_json(schema(found.kinds), indent=2)
        return
    entries = [_entry(kind, found) for kind in found.kinds]
    if name is not None:
        entries = [_named(name, entries, found.broken)]
    if as_json:
        broken = [] if name is not None else [{"name": each, "broken": why} for each, why in found.broken.items()]
        echo_json([*(_plain(entry) for entry in entries), *broken], indent=2)
    elif name is not None:
        _show(entries[0])
    else:
        _list(entries, found.broken)


class _Found(NamedTuple):
    """All techniques."""

    kinds: list[Any]
    """In the order in which they are asked."""
    origins: dict[str, str]
    broken: dict[str, str]
    """Sentences about unusable techniques of other packages."""
    choice: Any


def _found(config: Path | None, run_dir: Path | None) -> _Found:
    from craft.decide.techniques import BUILT_IN
    from craft.decide.techniques.technique import arrange
    from craft.settings.files.toml_file import TomlFile
    from craft.settings.plugins import foreign, load
    from craft.settings.rundir import find_run
    from craft.settings.techniques import choose, of_environment

    choice = choose(TomlFile(find_run(run_dir).config if run_dir is not None else config), of_environment())
    order = list(choice.techniques.by_name)
    kinds, origins, broken = arrange(BUILT_IN, order), {kind.name: "built-in" for kind in BUILT_IN}, {}
    # Enabled ones come first: they have one order, or the job would have been refused.
    for entry in sorted(foreign().values(), key=lambda each: each.name not in order):
        try:
            kinds = arrange([*kinds, load(entry)], order)
            origins[entry.name] = entry.dist.name if entry.dist is not None else entry.value
        except ConfigError as error:
            broken[entry.name] = str(error)
    return _Found(kinds, origins, broken, choice)


def _entry(kind: Any, found: _Found) -> _TechniqueRow:
    import msgspec

    from craft.decide.techniques import Alerts, GpuHealth
    from craft.settings.plugins import made, why_inexact
    from craft.settings.techniques import flags_of
    from craft.telemetry.nvml import why_not

    on = found.choice.techniques.by_name.get(kind.name)
    technique = on if on is not None else made(kind, kind.Settings())
    settings = []
    for field in () if kind is Alerts else msgspec.structs.fields(kind.Settings):
        described = msgspec.json.schema(field.type, schema_hook=lambda _: {})
        variable = next((f"CRAFT_{name.upper()}" for name, key in flags_of(kind).items() if key == field.name), None)
        settings.append(
            {
                "key": field.name,
                "value": msgspec.to_builtins(getattr(technique.settings, field.name), enc_hook=str),
                "origin": found.choice.origins.get(f"{kind.name}.{field.name}", "default"),
                "variable": variable,
                "description": described.get("description", ""),
            }
        )
    return _TechniqueRow(
        name=kind.name,
        summary=kind.summary,
        origin=found.origins[kind.name],
        on=on is not None,
        optional=kind.optional,
        settings=settings,
        emits=[event.__name__ for event in kind.emits],
        answers=[event.__name__ for event in kind.answers],
        points=list(kind.points),
        inexact=why_inexact(technique),
        unavailable=why_not() if kind is GpuHealth else None,
    )


def _plain(entry: _TechniqueRow) -> dict[str, Any]:
    """Convert for JSON, which has no infinity."""
    settings = [
        {**each, "value": str(each["value"]) if each["value"] == math.inf else each["value"]} for each in entry.settings
    ]
    return {**entry._asdict(), "settings": settings}


def _named(name: str, entries: list[_TechniqueRow], broken: dict[str, str]) -> _TechniqueRow:
    from craft.settings.files.toml_file import hint

    found = next((entry for entry in entries if entry.name == name), None)
    if name in broken:
        raise ConfigError(broken[name])
    if found is None:
        raise ConfigError(f"there is no technique {name!r}{hint(name, [entry.name for entry in entries])}")
    return found


def _list(entries: list[_TechniqueRow], broken: dict[str, str]) -> None:
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        standing = "on " if entry.on else "off"
        origin = "" if entry.origin == "built-in" else f" ({entry.origin})"
        missing = "" if entry.unavailable is None else f" (not available: {entry.unavailable})"
        echo(f"{entry.name:<{width}}  {standing}  {entry.summary}{origin}{missing}")
    for each in broken.values():
        echo(f"craft techniques: {each}", err=True)
    echo("\nPolicies are asked in this order. 'craft techniques NAME' shows one with its settings.")


def _show(entry: _TechniqueRow) -> None:
    from craft.settings.files.toml_file import toml

    echo(f"{entry.name}: {entry.summary}")
    always = "" if entry.optional else ", and cannot be switched off"
    echo(f"  {'on' if entry.on else 'off'}{always}; {entry.origin}")
    if entry.unavailable is not None:
        echo(f"  not available: {entry.unavailable}")
    if entry.inexact is not None:
        echo(f"  not exact: {entry.inexact}")
    for heading, names in (("emits", entry.emits), ("answers", entry.answers), ("hooks at", entry.points)):
        if names:
            echo(f"  {heading}: {', '.join(names)}")
    if entry.settings:
        echo(f"\n  [techniques.{entry.name}]")
    for each in entry.settings:
        variable = f", {each['variable']}" if each["variable"] else ""
        value = "(none)" if each["value"] is None else toml(each["value"])
        echo(f"  {each['key']} = {value}    ({each['origin']}{variable})")
        echo(f"      {each['description']}")
