"""Rules for alerts and hooks in craft.toml: ``[[alerts]]`` and ``[hooks.NAME]``.

``craft lighthouse --config`` reads them here; ``craft run --config`` reads them, too, to refuse what is wrong at once, and
writes them into the run directory for the lighthouse that it starts.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from craft.decide.alerts import ANSWERS, REGEX, RESOLVED, AlertRule, AlertSettings, Hook, Target
from craft.protocol.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = ("run", "alerts", "hooks")
T = TypeVar("T", bound=msgspec.Struct)
_HOOK_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_alerts(path: Path | None) -> AlertSettings:
    """Return what the file says about alerts; ConfigError names the file, the key, and the nearest one that there is."""
    if path is None:
        return AlertSettings()
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    _known(values, TABLES, f"{path}: there is no table")
    rules, hooks = values.get("alerts", []), values.get("hooks", {})
    if not isinstance(rules, list):
        raise ConfigError(f"{path}: alerts is a list of tables: write [[alerts]] above each rule")
    if not isinstance(hooks, dict):
        raise ConfigError(f"{path}: hooks has a table for each hook: write [hooks.NAME]")
    return AlertSettings(
        rules=tuple(_rule(each, f"{path}: [[alerts]] number {at}") for at, each in enumerate(rules, start=1)),
        hooks={name: _hook(name, each, f"{path}: [hooks.{name}]") for name, each in hooks.items()},
    )


def write_alerts(settings: AlertSettings) -> str:
    """Return ``settings`` as the part of a craft.toml from which they can be read back."""
    lines = []
    for rule in settings.rules:
        lines += ["", "[[alerts]]", *_assignments(msgspec.to_builtins(rule))]
    for name, hook in settings.hooks.items():
        lines += ["", f"[hooks.{name}]", *_assignments(msgspec.to_builtins(hook))]
    return "\n".join([*lines, ""]) if lines else ""


def _rule(values: Any, where: str) -> AlertRule:
    if isinstance(values, dict) and isinstance(values.get("target"), dict):
        _known(values["target"], Target.__struct_fields__, f"{where}: target has no key")
    rule = _converted(values, AlertRule, where)
    for label, wanted in rule.match.items():
        _check_regex(wanted, f"{where}: match.{label}")
    if isinstance(rule.target, Target) and rule.target.gpu is not None and rule.target.host is None:
        raise ConfigError(f"{where}: target.gpu needs target.host: a GPU has a number on its host only")
    _check_deadline(rule, where)
    return rule


def _hook(name: str, values: Any, where: str) -> Hook:
    if _HOOK_NAME.fullmatch(name) is None:
        raise ConfigError(f"{where}: a hook's name is part of its URL: use letters, digits, '-' and '_'")
    hook = _converted(values, Hook, where)
    meanings = (*ANSWERS, RESOLVED)
    for value, meaning in hook.answers.items():
        _check_regex(value, f"{where}: answers.{value}")
        if meaning not in meanings:
            raise ConfigError(f"{where}: answers.{value} is {meaning!r}{_hint(meaning, meanings)}")
    if hook.answers and hook.value is None:
        raise ConfigError(f"{where}: answers needs value: the field of the body that has these values")
    if hook.gpu is not None and hook.host is None:
        raise ConfigError(f"{where}: gpu needs host: a GPU has a number on its host only")
    _check_deadline(hook, where)
    return hook


def _converted(values: Any, kind: type[T], where: str) -> T:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is a table")
    _known(values, kind.__struct_fields__, f"{where} has no key")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        answer = values.get("answer")
        hint = _hint(answer, ANSWERS) if isinstance(answer, str) and "answer" in str(error) else ""
        raise ConfigError(f"{where}: {error}{hint}") from None


def _known(given: Iterable[str], known: Iterable[str], complaint: str) -> None:
    known = tuple(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"{complaint} {key!r}{_hint(key, known)}")


def _hint(given: str, known: Iterable[str]) -> str:
    known = tuple(known)
    near = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


def _check_regex(wanted: str, where: str) -> None:
    if wanted.startswith(REGEX):
        try:
            re.compile(wanted[1:])
        except re.error as error:
            raise ConfigError(f"{where}: {wanted[1:]!r} is no regular expression: {error}") from None


def _check_deadline(rule: AlertRule | Hook, where: str) -> None:
    if rule.deadline_s is not None and not 0 <= rule.deadline_s <= 1e6:
        raise ConfigError(f"{where}: deadline_s is a number of seconds, at least 0")


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items() if each is not None)
        return f"{{ {inside} }}"
    return msgspec.json.encode(value).decode()
