"""Choose a job's techniques and their settings from craft.toml, ``CRAFT_*`` variables and flags.

Built-in ones are on unless they are disabled. Those of other packages (entry-point group ``craft.techniques``) are on if they
are named: by a table ``[techniques.NAME]``, or by ``--enable NAME``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from craft.decide.techniques import BUILT_IN, Alerts, defaults
from craft.decide.techniques.technique import AnyTechnique, Chosen, arrange, described
from craft.protocol.errors import ConfigError
from craft.settings.alerts import read_alerts
from craft.settings.files.toml_file import TomlFile, complaint, hint, key_in, toml
from craft.settings.plugins import foreign, load, made

_ORDER = "order"
_ENABLED = "enabled"
_NAMED = re.compile(r"""(?P<key>\w+)\s*=\s*('[^']*'|"[^"]*"|[^:'"]*): (?P<rest>.*)""", re.DOTALL)
"""How an error names the setting that it is about: ``every='often': say ...``."""


class Given(NamedTuple):
    """A setting under its name outside of a table, with its origin."""

    value: Any
    origin: str
    called: str
    """Its name at the origin: ``--on-loss`` or ``CRAFT_ON_LOSS``; in craft.toml, the key of ``[run]``."""

    def refused(self, document: TomlFile, message: str) -> ConfigError:
        """Return an error about this value in the terms of its origin."""
        if self.origin == str(document.path):
            return document.error("run", self.called, f"[run] {self.called} = {toml(self.value)}: {message}")
        between = "=" if self.origin == "environment" else " "
        said = self.called if self.called.startswith("--set ") else f"{self.called}{between}{self.value}"
        return ConfigError(f"{said}: {message}")


class Wishes(NamedTuple):
    """What the command line says about techniques by name."""

    enable: Sequence[str] = ()
    disable: Sequence[str] = ()
    sets: Sequence[str] = ()
    """Each ``NAME.KEY=VALUE``; it also enables the technique."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.enable, *self.disable, *(_split(each)[0] for each in self.sets))

    def called(self, name: str) -> str:
        """Return the flag that names a technique: ``--enable hang`` or ``--set hang.limit_s=3``."""
        for flag, names in (("--enable", self.enable), ("--disable", self.disable)):
            if name in names:
                return f"{flag} {name}"
        return next((f"--set {each}" for each in self.sets if _split(each)[0] == name), name)

    def check(self) -> None:
        """Raise ConfigError if flags contradict each other."""
        for name in self.disable:
            others = self._replace(disable=())
            if name in others.names:
                raise ConfigError(f"{others.called(name)} and --disable {name} contradict each other: say one of them")

    def of(self, name: str) -> dict[str, Given]:
        """Return what is set for a technique, by key."""
        split = ((_split(each), each) for each in self.sets)
        return {key: Given(value, "flag", f"--set {each}") for (of, key, value), each in split if of == name}


NO_WISHES = Wishes()
OF_TECHNIQUES = tuple(name for kind in BUILT_IN for name in kind.flags)
"""Names of settings of techniques outside of their tables."""


def _split(text: str) -> tuple[str, str, str]:
    place, equals, value = text.partition("=")
    name, dot, key = place.partition(".")
    if not (equals and dot and name and key):
        raise ConfigError(f"--set {text}: write NAME.KEY=VALUE, such as --set hang.limit_s=5")
    return name.strip(), key.strip(), value.strip()


class TechniqueChoice(NamedTuple):
    techniques: Chosen
    origins: dict[str, str]
    """The origin of each setting, by ``NAME.KEY``; those that are missing are defaults."""


def _built_in() -> dict[str, type[AnyTechnique]]:
    return {kind.name: kind for kind in BUILT_IN}


def flags_of(kind: type[AnyTechnique]) -> Mapping[str, str]:
    """Return the names of settings outside of their table: only built-in techniques have such."""
    return kind.flags if kind in BUILT_IN else {}


def _kinds(names: Iterable[str], refused: Callable[[str, str], ConfigError]) -> list[type[AnyTechnique]]:
    """Return the built-in techniques, and those of other packages that are named."""
    found, others = _built_in(), foreign() if set(names) - set(_built_in()) else {}
    for name in names:
        if name in found:
            continue
        if name not in others:
            raise refused(name, f"there is no technique {name!r}{hint(name, (*found, *others))}")
        found[name] = load(others[name])
    return list(found.values())


def choose(document: TomlFile, given: Mapping[str, Given], wishes: Wishes = NO_WISHES) -> TechniqueChoice:
    """Return the techniques of a job; ConfigError says what is wrong and where."""
    wishes.check()
    on: list[AnyTechnique] = []
    origins: dict[str, str] = {}
    for kind in _arranged(document, wishes):
        own = {key: given[name] for name, key in flags_of(kind).items() if name in given}
        found = _made(kind, document, {**own, **wishes.of(kind.name)}, origins)
        if _is_on(kind, document, wishes):
            on.append(found)
        else:
            origins[f"{kind.name}.{_ENABLED}"] = "flag" if kind.name in wishes.disable else str(document.path)
    chosen = Chosen(on)
    chosen.check()
    return TechniqueChoice(chosen, origins)


def _arranged(document: TomlFile, wishes: Wishes) -> list[type[AnyTechnique]]:
    """Return all techniques that are named anywhere, in the order in which they are asked."""
    tables = dict(document.table("techniques"))
    order = tables.pop(_ORDER, [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise document.error("techniques", _ORDER, "order is a list of names of techniques")
    for name in order:
        if order.count(name) > 1:
            raise document.error("techniques", _ORDER, f"order has {name!r} twice: say it once")

    def refused(name: str, message: str) -> ConfigError:
        if name in tables or name in order:
            return document.error("techniques", name if name in tables else _ORDER, message)
        return ConfigError(f"{wishes.called(name)}: {message}")

    kinds = _kinds([*tables, *order, *wishes.names], refused)
    try:
        return arrange(kinds, order)
    except ConfigError as error:
        raise document.error("techniques", _ORDER, str(error)) if order else error from None


def _is_on(kind: type[AnyTechnique], document: TomlFile, wishes: Wishes) -> bool:
    table = f"techniques.{kind.name}"
    wanted = document.table(table).get(_ENABLED, True)
    if not isinstance(wanted, bool):
        raise document.error(table, _ENABLED, f"[{table}]: enabled is true or false")
    if kind.name in wishes.names:
        wanted = kind.name not in wishes.disable
    if not wanted and not kind.optional:
        message = f"technique {kind.name} cannot be switched off: everything else depends on it"
        raise document.error(table, _ENABLED, message) if kind.name not in wishes.disable else ConfigError(message)
    return wanted


def _made(
    kind: type[AnyTechnique], document: TomlFile, own: Mapping[str, Given], origins: dict[str, str]
) -> AnyTechnique:
    """Return a technique with its settings from its table, ``[run]``, variables and flags."""
    table = f"techniques.{kind.name}"
    values = dict(document.table(table))
    values.pop(_ENABLED, None)
    if kind is Alerts:
        document.check_keys(table, values, (), f"[{table}] has no key")
        for each in own.values():
            raise each.refused(
                document, "alerts has no settings: its rules are [[alerts]] and [hooks.NAME] of craft.toml"
            )
        return Alerts(read_alerts(document))
    document.check_keys(table, values, (*kind.Settings.__struct_fields__, _ENABLED), f"[{table}] has no key")
    origins.update({f"{kind.name}.{key}": str(document.path) for key in values})

    def in_table(key: str | None, message: str) -> ConfigError:
        if key in values:
            return document.error(table, key, f"[{table}] {key} = {toml(values[key])}: {message}")
        return document.error(table, None, f"[{table}]: {message}") if values else ConfigError(f"[{table}]: {message}")

    def refused(key: str | None, message: str) -> ConfigError:
        given = own.get(key or "")
        return given.refused(document, message) if given is not None else in_table(key, message)

    _check_names(kind, document, values, own)
    _converted(kind, values, in_table, strict=True)
    origins.update({f"{kind.name}.{key}": each.origin for key, each in own.items()})
    settings = _converted(kind, {**values, **{key: each.value for key, each in own.items()}}, refused, strict=False)
    _check_together(kind, settings, refused)
    return made(kind, settings)


Refuse = Callable[[str | None, str], ConfigError]


def _check_names(
    kind: type[AnyTechnique], document: TomlFile, values: Mapping[str, Any], own: Mapping[str, Given]
) -> None:
    """Raise ConfigError for settings of variables and flags that do not exist, or that the table sets, too."""
    table, known = f"techniques.{kind.name}", kind.Settings.__struct_fields__
    for key, each in own.items():
        if key in values and each.origin == str(document.path):
            raise document.error(table, key, f"[{table}] has {key}, and so has [run], by another name: say it once")
        if key == _ENABLED:
            raise each.refused(document, f"write --enable {kind.name} or --disable {kind.name}")
        if not known:
            raise each.refused(document, f"{kind.name} has no settings")
        if key not in known:
            raise each.refused(document, f"{kind.name} has no {key!r}{hint(key, known)}")


def _converted(kind: type[AnyTechnique], values: Mapping[str, Any], refused: Refuse, *, strict: bool) -> msgspec.Struct:
    try:
        settings = msgspec.convert(values, kind.Settings, strict=strict)
    except msgspec.ValidationError as error:
        raise refused(key_in(error), complaint(error, kind.Settings, values)) from None
    for key in kind.Settings.__struct_fields__:
        found = getattr(settings, key)
        if isinstance(found, float) and math.isnan(found):
            raise refused(key, "must be a number")
    return settings


def _check_together(kind: type[AnyTechnique], settings: msgspec.Struct, refused: Refuse) -> None:
    try:
        kind.check(settings)
    except ConfigError as error:
        found = _NAMED.fullmatch(str(error))
        raise (refused(found["key"], found["rest"]) if found else refused(None, str(error))) from None
    except Exception as error:
        raise ConfigError(f"{described(kind)}: check: {type(error).__name__}: {error}") from error


def in_variables(names: Iterable[str]) -> dict[str, Given]:
    """Return those of the named settings that ``CRAFT_*`` variables give."""
    named = ((name, f"CRAFT_{name.upper()}") for name in names)
    return {name: Given(os.environ[key], "environment", key) for name, key in named if key in os.environ}


def of_environment() -> dict[str, Given]:
    """Return the settings of built-in techniques in ``CRAFT_*`` variables."""
    return in_variables(OF_TECHNIQUES)


def given_by_flags(flags: Mapping[str, Any]) -> dict[str, Given]:
    """Return the flags that were given."""
    return {
        name: Given(value, "flag", f"--{name.replace('_', '-')}") for name, value in flags.items() if value is not None
    }


def to_toml(choice: TechniqueChoice) -> str:
    """Return tables of a craft.toml, each setting with its origin."""
    lines = ["", "[techniques]", f"order = {toml(list(choice.techniques.by_name))}"]
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


def flat(document: TomlFile) -> dict[str, Any]:
    """Return the settings of built-in techniques in a craft.toml, under their names outside of tables."""
    tables = document.table("techniques")
    named = ((name, tables.get(kind.name, {}).get(key)) for kind in BUILT_IN for name, key in kind.flags.items())
    return {name: value for name, value in named if value is not None}


def to_json(techniques: Chosen) -> str:
    """Return the techniques for the environment of a worker, which does not need alerts."""
    tables = {
        each.name: msgspec.to_builtins(each.settings)
        for each in techniques.by_name.values()
        if not isinstance(each, Alerts)
    }
    # Not msgspec: it writes an infinite limit as null.
    return json.dumps(tables)


def from_json(text: str) -> Chosen:
    """Return the techniques that ``to_json`` wrote."""
    tables: dict[str, Any] = json.loads(text)
    kinds = {kind.name: kind for kind in _kinds(list(tables), lambda _, message: ConfigError(message))}
    return Chosen([made(kinds[name], msgspec.convert(table, kinds[name].Settings)) for name, table in tables.items()])


def alone() -> Chosen:
    """Return the techniques of a script that runs outside of ``craft run``."""
    given = of_environment()
    return choose(TomlFile(None), given).techniques if given else defaults()
