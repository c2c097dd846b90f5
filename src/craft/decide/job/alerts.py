"""Turn alerts of other systems into events: apply the rules and find the worker or host that is meant.

Enters: a ``Notice``, the rules and hooks of craft.toml, the job's state. Leaves: ``AlertFired`` or ``AlertResolved``.
``control/http/alerts`` calls it for everything that arrives at ``/v1/alerts``, ``/v1/cloudevents`` and ``/v1/hooks``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, get_args

import msgspec

from craft.decide.job.state import JobState, WorkerView
from craft.protocol.errors import MalformedMessage
from craft.protocol.events import AlertFired, AlertResolved
from craft.protocol.values.alerts import AlertAnswer, Notice

REGEX = "~"
"""A wanted value with this prefix is an RE2 regular expression; it must match the full value."""
ANSWERS: tuple[AlertAnswer, ...] = get_args(AlertAnswer)
RESOLVED = "resolved"
ANSWER_LABEL = "craft_answer"
_WORKER_LABELS = ("worker_id", "worker")
_HOST_LABELS = ("host", "hostname", "Hostname", "node", "instance")
_GPU_LABELS = ("gpu", "local_rank")
_AIMED: tuple[AlertAnswer, ...] = ("drain", "fail")
"""Answers that act on a worker or a host; the others act on the job."""
_SAVING: tuple[AlertAnswer, ...] = ("checkpoint", "preempt")
_MAX_REASON_CHARS = 500
_NUMBER = re.compile(r"(\d{1,4})$")
_PORT = re.compile(r":\d{1,5}$")


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str) -> object | None:
        """Return a match if the pattern fits all of ``text``."""


class AlertTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Labels that name the target of an alert."""

    worker: str | None = None
    """The label with a worker's id."""
    host: str | None = None
    """The label with a host's name or address; a port after it is ignored."""
    gpu: str | None = None
    """The label with a GPU number on that host, such as ``3`` or ``nvidia3``: names the worker of that local rank."""


class AlertRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[alerts]]`` table of craft.toml; the first that matches counts."""

    match: dict[str, str] = {}
    """Labels and their wanted values; the prefix ``~`` makes a value a regular expression."""
    answer: AlertAnswer = "report"
    target: str | AlertTarget | None = None
    """The label that names a worker or a host, or a table of labels; by default the usual names are tried."""
    deadline_s: float | None = None
    """For ``drain`` and ``preempt``: workers still there after this long are ended."""


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[hooks.NAME]`` table of craft.toml. Paths such as ``payload.node`` name fields of the body."""

    worker: str | None = None
    host: str | None = None
    gpu: str | None = None
    """The fields that name the target, like those of a rule's target."""
    id: str | None = None
    """The field that identifies a delivery; by default a repeated delivery with the same content is ignored."""
    value: str | None = None
    """The field whose value selects the answer."""
    answers: dict[str, str] = {}
    """The answer for each value, or ``resolved``. The prefix ``~`` makes a value a regular expression."""
    answer: AlertAnswer = "report"
    """The answer for values that ``answers`` does not list."""
    deadline_s: float | None = None

    def meaning(self, value: str | None) -> str:
        """Return the answer for ``value``, or ``resolved``."""
        found = (meaning for wanted, meaning in self.answers.items() if value is not None and matches(wanted, value))
        return next(found, self.answer)


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that craft.toml says about alerts."""

    rules: tuple[AlertRule, ...] = ()
    hooks: dict[str, Hook] = {}

    def answers(self) -> frozenset[str]:
        """Return all answers that rules and hooks can give."""
        of_hooks = {answer for hook in self.hooks.values() for answer in (hook.answer, *hook.answers.values())}
        return frozenset({rule.answer for rule in self.rules} | of_hooks)


def matches(wanted: str, value: str) -> bool:
    """Return whether a value matches the wanted one."""
    return compiled(wanted[1:]).fullmatch(value) is not None if wanted.startswith(REGEX) else wanted == value


@functools.cache
def compiled(pattern: str) -> Pattern:
    """Return a rule's regular expression, compiled by RE2; raise ValueError if RE2 rejects it.

    RE2 takes time linear in the length of the value. With Python's ``re``, a short alert could block the lighthouse
    for minutes.
    """
    try:
        # Imported late: only jobs with regular expressions in their rules need the package.
        import re2
    except ImportError:
        raise ValueError("regular expressions need the package google-re2: pip install google-re2") from None
    options = re2.Options()
    options.log_errors = False
    try:
        found: Pattern = re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "unknown"
        raise ValueError(
            f"{pattern!r} is not an RE2 regular expression ({reason}); the syntax is that of Prometheus"
        ) from None
    return found


def event_of(
    notice: Notice, settings: AlertSettings, state: JobState, *, saves: bool, preempts: bool, now: float
) -> AlertFired | AlertResolved:
    """Return the event that ``notice`` becomes.

    ``saves``: whether some worker takes checkpoints; ``preempts``: whether an active technique answers preemption.
    """
    said = {"source": notice.source, "name": notice.name, "fingerprint": notice.fingerprint}
    if notice.resolved:
        return AlertResolved(**said, starts_at=notice.starts_at, labels=notice.labels)
    rule = notice_rule(notice, settings)
    answer = rule.answer
    worker_id, host = aim(rule.target, notice.labels, state)
    note = ""
    if answer in _AIMED and worker_id is None and host is None:
        note = f"nothing to {answer}: its labels name no worker and no host of this job"
    elif answer in _SAVING and not saves:
        note = f"no {answer}: no worker takes checkpoints"
    elif answer == "preempt" and not preempts:
        note = "no preempt: no active technique answers it"
    reason = f"alert {notice.name}" + (f": {notice.summary}" if notice.summary else "")
    return AlertFired(
        **said,
        starts_at=notice.starts_at,
        labels=notice.labels,
        answer="report" if note else answer,
        worker_id=worker_id,
        host=host,
        deadline_s=rule.deadline_s,
        reason=reason[:_MAX_REASON_CHARS],
        note=note,
        time=now,
    )


def notice_rule(notice: Notice, settings: AlertSettings) -> AlertRule:
    """Return the rule for ``notice``: its hook's, else the first that matches, else the answer in its own labels."""
    if notice.hook is not None:
        hook = settings.hooks[notice.hook]
        # The hook copied its fields to labels of these names.
        target = AlertTarget(worker="worker", host="host", gpu="gpu")
        return AlertRule(answer=_own_answer(notice), target=target, deadline_s=hook.deadline_s)
    for rule in settings.rules:
        if all(matches(wanted, notice.labels.get(label, "")) for label, wanted in rule.match.items()):
            return rule
    return AlertRule(answer=_own_answer(notice))


def _own_answer(notice: Notice) -> AlertAnswer:
    """Return the answer that the notice itself asks for."""
    for answer in ANSWERS:
        if notice.wanted == answer:
            return answer
    if notice.wanted is None:
        return "report"
    message = f"{ANSWER_LABEL} must be one of {', '.join(ANSWERS)}, not {notice.wanted[:40]!r}"
    raise MalformedMessage(message, f"{notice.where}.{ANSWER_LABEL}")


def aim(target: str | AlertTarget | None, labels: Mapping[str, str], state: JobState) -> tuple[str | None, str | None]:
    """Return the live worker or host of this job that ``labels`` name; (None, None) if they name none."""
    living = state.having("waiting", "member")
    if isinstance(target, str):
        name = labels.get(target, "")
        return _worker(living, name), None if _worker(living, name) else _host(living, name)
    if target is None:
        target = AlertTarget(
            worker=_first(_WORKER_LABELS, labels), host=_first(_HOST_LABELS, labels), gpu=_first(_GPU_LABELS, labels)
        )
    if target.worker is not None and target.worker in labels:
        return _worker(living, labels[target.worker]), None
    host = _host(living, labels.get(target.host or "", ""))
    if host is None or target.gpu is None or target.gpu not in labels:
        # Without a GPU label the alert is about the host; with one, the host's other workers are not affected.
        return None, host
    number = _NUMBER.search(labels[target.gpu])
    place = int(number.group(1)) if number else None
    there = [view.member for view in living if view.member.host == host and view.member.local_rank is not None]
    return next((each.worker_id for each in there if each.local_rank == place), None), None


def _first(names: Sequence[str], labels: Mapping[str, str]) -> str | None:
    return next((name for name in names if labels.get(name)), None)


def _worker(living: Iterable[WorkerView], name: str) -> str | None:
    return next((view.member.worker_id for view in living if view.member.worker_id == name), None)


def _host(living: Iterable[WorkerView], name: str) -> str | None:
    """Return the host of this name or address; the first label of a DNS name is enough if it is unique."""
    bare = _PORT.sub("", name).strip("[]")
    members = [view.member for view in living]
    for member in members:
        # Every host has the loopback address, so it identifies none.
        if bare == member.host or (bare == member.address and not bare.startswith("127.") and bare != "::1"):
            return member.host
    short = {member.host for member in members if bare and _short(member.host) == _short(bare)}
    return short.pop() if len(short) == 1 else None


def _short(host: str) -> str:
    first = host.partition(".")[0]
    # The first number of an IP address is not a host name.
    return host if first.isdigit() else first
