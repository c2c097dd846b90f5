"""Alerts of other systems: what a rule makes of one, and whom of this job it is about.

Enters: a ``Notice``, the rules and hooks of craft.toml, the job's state. Leaves: the event that it becomes.
``control/http/alerts`` calls it for everything that comes to ``/v1/alerts``, ``/v1/cloudevents`` and ``/v1/hooks``.
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
"""A wanted value that begins with this is a regular expression of RE2's, for the whole value."""
ANSWERS: tuple[AlertAnswer, ...] = get_args(AlertAnswer)
RESOLVED = "resolved"
ANSWER_LABEL = "craft_answer"
_WORKER_LABELS = ("worker_id", "worker")
_HOST_LABELS = ("host", "hostname", "Hostname", "node", "instance")
_GPU_LABELS = ("gpu", "local_rank")
_AIMED: tuple[AlertAnswer, ...] = ("drain", "fail")
"""Answers that are about a worker or a host; the others are about the whole job."""
_SAVING: tuple[AlertAnswer, ...] = ("checkpoint", "preempt")
_MAX_REASON_CHARS = 500
_NUMBER = re.compile(r"(\d{1,4})$")
_PORT = re.compile(r":\d{1,5}$")


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str) -> object | None:
        """Return something if it fits the whole of ``text``."""


class AlertTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which labels name whom."""

    worker: str | None = None
    """The label with a worker's id."""
    host: str | None = None
    """The label with a host's name or address; a port behind it does not count."""
    gpu: str | None = None
    """The label with the number of a GPU of that host, such as ``3`` or ``nvidia3``: the worker in this place is meant."""


class AlertRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[alerts]]`` of craft.toml; the first that matches counts."""

    match: dict[str, str] = {}
    """Labels and their values; ``~`` before a value makes it a regular expression."""
    answer: AlertAnswer = "report"
    target: str | AlertTarget | None = None
    """The label that names a worker or a host, or a table with several; by default the usual ones are tried."""
    deadline_s: float | None = None
    """With ``drain`` and ``preempt``: whoever is still there after this long is ended."""


class Hook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[hooks.NAME]`` of craft.toml. Fields of the body are named by paths such as ``payload.node``."""

    worker: str | None = None
    host: str | None = None
    gpu: str | None = None
    """The fields that name whom it is about, like those of a rule's target."""
    id: str | None = None
    """The field that is different for every delivery of something new; by default what holds, holds until it changes."""
    value: str | None = None
    """The field whose value says what it means."""
    answers: dict[str, str] = {}
    """What each value means: an answer, or ``resolved``. ``~`` before a value makes it a regular expression."""
    answer: AlertAnswer = "report"
    """What is done where ``answers`` has nothing for the value."""
    deadline_s: float | None = None

    def meaning(self, value: str | None) -> str:
        """What ``value`` means: an answer, or ``resolved``."""
        found = (meaning for wanted, meaning in self.answers.items() if value is not None and matches(wanted, value))
        return next(found, self.answer)


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that craft.toml says about alerts."""

    rules: tuple[AlertRule, ...] = ()
    hooks: dict[str, Hook] = {}

    def answers(self) -> frozenset[str]:
        """All that may be done by them."""
        of_hooks = {answer for hook in self.hooks.values() for answer in (hook.answer, *hook.answers.values())}
        return frozenset({rule.answer for rule in self.rules} | of_hooks)


def matches(wanted: str, value: str) -> bool:
    """Whether a value is the wanted one."""
    return compiled(wanted[1:]).fullmatch(value) is not None if wanted.startswith(REGEX) else wanted == value


@functools.cache
def compiled(pattern: str) -> Pattern:
    """Return a rule's regular expression, compiled by RE2; ValueError says why it cannot be.

    Not by Python's ``re``: there a few characters of an alert can keep the lighthouse busy for minutes. RE2's time is
    linear in the length of the value, whatever the pattern.
    """
    try:
        # Only now: a job without regular expressions in its rules does without the package.
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
            f"{pattern!r} is no regular expression of RE2, whose syntax is that of Prometheus ({reason})"
        ) from None
    return found


def event_of(
    notice: Notice, settings: AlertSettings, state: JobState, *, saves: bool, preempts: bool, now: float
) -> AlertFired | AlertResolved:
    """Return the event that ``notice`` becomes.

    ``saves``: whether some worker takes checkpoints; ``preempts``: whether a technique is on that sees a preemption through.
    """
    said = {"source": notice.source, "name": notice.name, "fingerprint": notice.fingerprint}
    if notice.resolved:
        return AlertResolved(**said, starts_at=notice.starts_at, labels=notice.labels)
    rule = notice_rule(notice, settings)
    answer = rule.answer
    worker_id, host = aim(rule.target, notice.labels, state)
    note = ""
    if answer in _AIMED and worker_id is None and host is None:
        note = f"nothing to {answer}: its labels name no worker and no host that is in this job now"
    elif answer in _SAVING and not saves:
        note = f"no {answer}: no worker takes checkpoints"
    elif answer == "preempt" and not preempts:
        note = "no preempt: no technique that is on answers it"
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
    """Return the rule by which ``notice`` is answered: that of its hook, the first that matches, or its own word."""
    if notice.hook is not None:
        hook = settings.hooks[notice.hook]
        # Its labels are named after what the hook's fields are there for.
        target = AlertTarget(worker="worker", host="host", gpu="gpu")
        return AlertRule(answer=_own_answer(notice), target=target, deadline_s=hook.deadline_s)
    for rule in settings.rules:
        if all(matches(wanted, notice.labels.get(label, "")) for label, wanted in rule.match.items()):
            return rule
    return AlertRule(answer=_own_answer(notice))


def _own_answer(notice: Notice) -> AlertAnswer:
    """What it says itself that is to be done."""
    for answer in ANSWERS:
        if notice.wanted == answer:
            return answer
    if notice.wanted is None:
        return "report"
    message = f"{ANSWER_LABEL} must be one of {', '.join(ANSWERS)}, not {notice.wanted[:40]!r}"
    raise MalformedMessage(message, f"{notice.where}.{ANSWER_LABEL}")


def aim(target: str | AlertTarget | None, labels: Mapping[str, str], state: JobState) -> tuple[str | None, str | None]:
    """Return the worker or the host that ``labels`` name; (None, None) if nobody of this job who is still there."""
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
        # One host is no more than what was named; its other workers have nothing to do with a GPU that is not theirs.
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
    """The host of this name or address; the first part of a longer name is enough, if no other host has it, too."""
    bare = _PORT.sub("", name).strip("[]")
    members = [view.member for view in living]
    for member in members:
        # Every host has the loopback address: it says nothing about which one is meant.
        if bare == member.host or (bare == member.address and not bare.startswith("127.") and bare != "::1"):
            return member.host
    short = {member.host for member in members if bare and _short(member.host) == _short(bare)}
    return short.pop() if len(short) == 1 else None


def _short(host: str) -> str:
    first = host.partition(".")[0]
    # The first number of an address is no name.
    return host if first.isdigit() else first
