"""Read the alert rules and hooks of craft.toml: ``[[alerts]]`` and ``[hooks.NAME]``.

``craft lighthouse --config`` reads them here. ``craft run --config`` does, too, to report errors at once, and writes them
into the run directory for the lighthouse that it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from craft.decide.job.alerts import ANSWERS, REGEX, RESOLVED, AlertRule, AlertSettings, AlertTarget, Hook, compiled
from craft.protocol.errors import ConfigError
from craft.settings.files.toml_file import TomlFile, hint, key_in, toml

T = TypeVar("T", bound=msgspec.Struct)
_HOOK_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_alerts(document: TomlFile) -> AlertSettings:
    """Return the alert settings of a file; ConfigError names file, line, key, and the nearest valid one."""
    rules, hooks = document.values.get("alerts", []), document.values.get("hooks", {})
    if not isinstance(rules, list):
        raise document.error("alerts", None, "alerts is a list of tables: write [[alerts]] above each rule")
    if not isinstance(hooks, dict):
        raise document.error("", "hooks", "hooks has a table for each hook: write [hooks.NAME]")
    return AlertSettings(
        rules=tuple(_rule(each, _Where(document, "alerts", at)) for at, each in enumerate(rules, start=1)),
        hooks={name: _hook(name, each, _Where(document, f"hooks.{name}")) for name, each in hooks.items()},
    )


class _Where(NamedTuple):
    """A table of the file."""

    document: TomlFile
    table: str
    number: int = 1

    @property
    def words(self) -> str:
        return f"[[alerts]] number {self.number}" if self.table == "alerts" else f"[{self.table}]"

    def error(self, key: str | None, message: str) -> ConfigError:
        return self.document.error(self.table, key, f"{self.words}: {message}", number=self.number)

    def known(self, given: Iterable[str], known: Iterable[str], complaint: str) -> None:
        self.document.check_keys(self.table, given, known, f"{self.words}{complaint}", number=self.number)


def write_alerts(settings: AlertSettings) -> str:
    """Return ``settings`` as the part of a craft.toml from which they can be read back."""
    lines = []
    for rule in settings.rules:
        lines += ["", "[[alerts]]", *_assignments(msgspec.to_builtins(rule))]
    for name, hook in settings.hooks.items():
        lines += ["", f"[hooks.{name}]", *_assignments(msgspec.to_builtins(hook))]
    return "\n".join([*lines, ""]) if lines else ""


def _rule(values: Any, where: _Where) -> AlertRule:
    if isinstance(values, dict) and isinstance(values.get("target"), dict):
        where.known(values["target"], AlertTarget.__struct_fields__, ": target has no key")
    rule = _converted(values, AlertRule, where)
    for label, wanted in rule.match.items():
        _check_regex(wanted, where, "match", label)
    if isinstance(rule.target, AlertTarget) and rule.target.gpu is not None and rule.target.host is None:
        raise where.error("target", "target.gpu needs target.host: a GPU has a number on its host only")
    _check_deadline(rule, where)
    return rule


def _hook(name: str, values: Any, where: _Where) -> Hook:
    if _HOOK_NAME.fullmatch(name) is None:
        raise where.error(None, "a hook's name is part of its URL: use letters, digits, '-' and '_'")
    hook = _converted(values, Hook, where)
    meanings = (*ANSWERS, RESOLVED)
    for value, meaning in hook.answers.items():
        _check_regex(value, where, "answers", value)
        if meaning not in meanings:
            raise where.error("answers", f"answers.{value} is {meaning!r}{hint(meaning, meanings)}")
    if hook.answers and hook.value is None:
        raise where.error("answers", "answers needs value: the field of the body that has these values")
    if hook.gpu is not None and hook.host is None:
        raise where.error("gpu", "gpu needs host: a GPU has a number on its host only")
    _check_deadline(hook, where)
    return hook


def _converted(values: Any, kind: type[T], where: _Where) -> T:
    if not isinstance(values, dict):
        raise where.error(None, "is a table")
    where.known(values, kind.__struct_fields__, " has no key")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        answer = values.get("answer")
        more = hint(answer, ANSWERS) if isinstance(answer, str) and "answer" in str(error) else ""
        raise where.error(key_in(error), f"{error}{more}") from None


def _check_regex(wanted: str, where: _Where, key: str, label: str) -> None:
    if wanted.startswith(REGEX):
        try:
            compiled(wanted[1:])
        except ValueError as error:
            raise where.error(key, f"{key}.{label}: {error}") from None


def _check_deadline(rule: AlertRule | Hook, where: _Where) -> None:
    if rule.deadline_s is not None and not 0 <= rule.deadline_s <= 1e6:
        raise where.error("deadline_s", "deadline_s is a number of seconds, at least 0")


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {toml(value)}" for key, value in values.items() if value is not None]
