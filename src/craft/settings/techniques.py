"""Which techniques a job has, and their settings: from craft.toml, ``CRAFT_*`` variables and flags.

Built-in ones are on unless they are switched off. Those of other packages are found by the entry-point group
``craft.techniques`` and are on when they are named: by a table ``[techniques.NAME]``, or by ``--enable NAME``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import msgspec

from craft.decide.technique import AnyTechnique, Chosen, Technique, arrange
from craft.decide.techniques import BUILT_IN, Alerts, defaults
from craft.protocol.errors import ConfigError
from craft.settings.alerts import read_alerts
from craft.settings.document import Document, hint, key_in, toml

GROUP = "craft.techniques"
_ORDER = "order"
_ENABLED = "enabled"


class Given(NamedTuple):
    """A setting under the name that it has outside of a table, and who gave it."""

    value: Any
    origin: str
    called: str
    """As whoever gave it calls it: ``--on-loss`` or ``CRAFT_ON_LOSS``."""


class Wishes(NamedTuple):
    """What the command line says about techniques by their names."""

    enable: Sequence[str] = ()
    disable: Sequence[str] = ()
    sets: Sequence[str] = ()
    """Each ``NAME.KEY=VALUE``; it also switches the technique on."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.enable, *self.disable, *(_split(each)[0] for each in self.sets))

    def of(self, name: str) -> dict[str, Given]:
        """What is set for a technique, by key."""
        split = ((_split(each), each) for each in self.sets)
        return {key: Given(value, "flag", f"--set {each}") for (of, key, value), each in split if of == name}


NO_WISHES = Wishes()


def _split(text: str) -> tuple[str, str, str]:
    place, equals, value = text.partition("=")
    name, dot, key = place.partition(".")
    if not (equals and dot and name and key):
        raise ConfigError(f"--set {text}: write NAME.KEY=VALUE, such as --set hang.limit_s=5")
    return name.strip(), key.strip(), value.strip()


class Choice(NamedTuple):
    techniques: Chosen
    origins: dict[str, str]
    """Where each setting came from, by ``NAME.KEY``; those that are not here are defaults."""


# Those of other packages.


def foreign() -> dict[str, EntryPoint]:
    """What other packages offer, by name; nothing of it is imported."""
    return {each.name: each for each in entry_points(group=GROUP)}


def load(entry: EntryPoint) -> type[AnyTechnique]:
    """Import a technique of another package; ConfigError says what is wrong with it."""
    where = f"technique {entry.name} ({entry.value})"
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Technique)):
        raise ConfigError(f"{where} is no class derived from craft.techniques.Technique")
    if getattr(kind, "name", None) != entry.name:
        raise ConfigError(f"{where} calls itself {getattr(kind, 'name', None)!r}: both names must be the same")
    if kind.name in _built_in():
        raise ConfigError(f"{where} has the name of a built-in one: it needs another")
    try:
        kind.Settings()
    except TypeError as error:
        raise ConfigError(f"{where}: every one of its settings needs a default: {error}") from None
    return kind


def _built_in() -> dict[str, type[AnyTechnique]]:
    return {kind.name: kind for kind in BUILT_IN}


def _kinds(names: Iterable[str], document: Document) -> list[type[AnyTechnique]]:
    """The built-in techniques, and those of other packages that are named."""
    found, others = _built_in(), foreign() if set(names) - set(_built_in()) else {}
    for name in names:
        if name in found:
            continue
        if name not in others:
            message = f"there is no technique {name!r}{hint(name, (*found, *others))}"
            if document.values.get("techniques", {}).get(name) is None:
                raise ConfigError(message)
            raise document.error("techniques", name, message)
        found[name] = load(others[name])
    return list(found.values())


# Settings.


def choose(document: Document, given: Mapping[str, Given], wishes: Wishes = NO_WISHES) -> Choice:
    """Return the techniques of a job; ConfigError says what is wrong and where."""
    tables = dict(document.table("techniques"))
    order = tables.pop(_ORDER, [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise document.error("techniques", _ORDER, "order is a list of names of techniques")
    kinds = arrange(_kinds([*tables, *order, *wishes.names], document), order)
    on: list[AnyTechnique] = []
    origins: dict[str, str] = {}
    for kind in kinds:
        own = {key: given[name] for name, key in kind.flags.items() if name in given}
        made = _made(kind, document, {**own, **wishes.of(kind.name)}, origins)
        if _is_on(kind, document, wishes):
            on.append(made)
        else:
            origins[f"{kind.name}.{_ENABLED}"] = "flag" if kind.name in wishes.disable else str(document.path)
    chosen = Chosen(on)
    chosen.check()
    return Choice(chosen, origins)


def _is_on(kind: type[AnyTechnique], document: Document, wishes: Wishes) -> bool:
    table = f"techniques.{kind.name}"
    wanted = document.table(table).get(_ENABLED, True)
    if not isinstance(wanted, bool):
        raise document.error(table, _ENABLED, f"[{table}]: enabled is true or false")
    if kind.name in wishes.names:
        wanted = kind.name not in wishes.disable
    if not wanted and not kind.optional:
        message = f"technique {kind.name} cannot be switched off: everything else stands on it"
        raise document.error(table, _ENABLED, message) if kind.name not in wishes.disable else ConfigError(message)
    return wanted


def _made(
    kind: type[AnyTechnique], document: Document, own: Mapping[str, Given], origins: dict[str, str]
) -> AnyTechnique:
    """A technique with its settings: those of its table, of ``[run]``, of variables and of flags."""
    table = f"techniques.{kind.name}"
    values = dict(document.table(table))
    values.pop(_ENABLED, None)
    if kind is Alerts:
        document.check_keys(table, values, (), f"[{table}] has no key")
        return Alerts(read_alerts(document))
    document.check_keys(table, values, (*kind.Settings.__struct_fields__, _ENABLED), f"[{table}] has no key")
    origins.update({f"{kind.name}.{key}": str(document.path) for key in values})
    try:
        msgspec.convert(values, kind.Settings)
    except msgspec.ValidationError as error:
        raise document.error(table, key_in(error), f"[{table}]: {error}") from None
    for key, each in own.items():
        if key in values and each.origin == str(document.path):
            raise document.error(table, key, f"[{table}] has {key}, and so has [run], by another name: say it once")
        if key not in kind.Settings.__struct_fields__:
            raise ConfigError(f"{each.called}: {kind.name} has no {key!r}{hint(key, kind.Settings.__struct_fields__)}")
        values[key] = each.value
        origins[f"{kind.name}.{key}"] = each.origin
        try:
            msgspec.convert({key: each.value}, kind.Settings, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{each.called}: {error}") from None
    settings = msgspec.convert(values, kind.Settings, strict=False)
    kind.check(settings)
    return kind(settings)


def of_environment() -> dict[str, Given]:
    """What ``CRAFT_*`` variables say about built-in techniques."""
    found = {}
    for kind in BUILT_IN:
        for name in kind.flags:
            variable = f"CRAFT_{name.upper()}"
            if variable in os.environ:
                found[name] = Given(os.environ[variable], "environment", variable)
    return found


def given_by_flags(flags: Mapping[str, Any]) -> dict[str, Given]:
    """What flags say, where they were given."""
    return {
        name: Given(value, "flag", f"--{name.replace('_', '-')}") for name, value in flags.items() if value is not None
    }


# On their way to other processes.


def to_toml(choice: Choice) -> str:
    """As tables of a craft.toml, each setting with its origin."""
    lines: list[str] = []
    names = list(choice.techniques.by_name)
    lines += ["", "[techniques]", f"order = {toml(names)}"]
    for kind in (*BUILT_IN, *(type(each) for each in choice.techniques.by_name.values() if type(each) not in BUILT_IN)):
        lines += ["", f"[techniques.{kind.name}]"]
        found = choice.techniques.by_name.get(kind.name)
        if found is None:
            lines.append(f"{_ENABLED} = false  # {choice.origins.get(f'{kind.name}.{_ENABLED}', 'default')}")
        elif not isinstance(found, Alerts):
            for key, value in msgspec.to_builtins(found.settings).items():
                if value is not None:
                    lines.append(f"{key} = {toml(value)}  # {choice.origins.get(f'{kind.name}.{key}', 'default')}")
    return "\n".join([*lines, ""])


def flat(document: Document) -> dict[str, Any]:
    """The settings of built-in techniques in a craft.toml, under the names that they have outside of their tables."""
    tables = document.table("techniques")
    named = ((name, tables.get(kind.name, {}).get(key)) for kind in BUILT_IN for name, key in kind.flags.items())
    return {name: value for name, value in named if value is not None}


def to_json(techniques: Chosen) -> str:
    """For the environment of a worker; alerts are not its business."""
    tables = {
        each.name: msgspec.to_builtins(each.settings)
        for each in techniques.by_name.values()
        if not isinstance(each, Alerts)
    }
    return msgspec.json.encode(tables).decode()


def from_json(text: str) -> Chosen:
    """What ``to_json`` wrote."""
    tables: dict[str, Any] = msgspec.json.decode(text)
    kinds = {kind.name: kind for kind in _kinds(list(tables), Document(None))}
    return Chosen([kinds[name](msgspec.convert(table, kinds[name].Settings)) for name, table in tables.items()])


def alone() -> Chosen:
    """Of a script that runs outside of ``craft run``."""
    given = of_environment()
    return choose(Document(None), given).techniques if given else defaults()
