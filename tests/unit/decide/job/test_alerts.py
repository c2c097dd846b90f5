"""Whom an alert is about, and by which rule it is answered."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from craft.decide.job.alerts import AlertRule, AlertSettings, AlertTarget, Hook, aim, event_of, matches
from craft.decide.job.state import JobState, WorkerView
from craft.decide.policies.alert import AlertPolicy
from craft.decide.techniques import defaults
from craft.decide.techniques.alerts import Alerts
from craft.decide.techniques.technique import Chosen
from craft.protocol.actions import Drain, Preempt
from craft.protocol.errors import ConfigError
from craft.protocol.events import AlertFired
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import PreemptionOrder
from craft.protocol.values.alerts import Notice


def _view(worker_id: str, host: str, local_rank: int, **more: str) -> WorkerView:
    member = Member(worker_id=worker_id, host=host, local_rank=local_rank, address=more.pop("address", "127.0.0.1"))
    return WorkerView(member=member, standing=more.pop("standing", "member"))  # type: ignore[arg-type]


JOB = JobState(
    slots=4,
    workers=(
        _view("a-w0", "a.cluster", 0, address="10.0.0.1"),
        _view("a-w1", "a.cluster", 1, address="10.0.0.1", standing="lost"),
        _view("a-w2", "a.cluster", 1, address="10.0.0.1"),
        _view("b-w0", "b", 0, address="10.0.0.2"),
    ),
)


@pytest.mark.parametrize(
    ("target", "labels", "whom"),
    [
        (None, {"worker_id": "b-w0", "host": "a.cluster"}, ("b-w0", None)),
        (None, {"worker": "b-w0"}, ("b-w0", None)),
        (None, {"host": "b"}, (None, "b")),
        (None, {"instance": "b:9100"}, (None, "b")),
        (None, {"instance": "10.0.0.2:9100"}, (None, "b")),
        (None, {"instance": "[::1]:9100"}, (None, None)),
        (None, {"instance": "127.0.0.1:9100"}, (None, None)),
        (None, {"instance": "a:9100"}, (None, "a.cluster")),
        (None, {"instance": "b.elsewhere.net"}, (None, "b")),
        (None, {"instance": "a.cluster:9400", "gpu": "0"}, ("a-w0", None)),
        # The worker that had this GPU before is lost: who is there now is meant.
        (None, {"Hostname": "a.cluster", "gpu": "1"}, ("a-w2", None)),
        # Nobody of this job has that GPU: that is no reason to do anything to the others of its host.
        (None, {"Hostname": "a.cluster", "gpu": "7"}, (None, None)),
        (None, {"worker": "a-w1"}, (None, None)),
        (None, {"severity": "page"}, (None, None)),
        ("pod", {"pod": "b-w0"}, ("b-w0", None)),
        ("pod", {"pod": "b"}, (None, "b")),
        ("pod", {"worker_id": "b-w0"}, (None, None)),
        ("pod", {"pod": ""}, (None, None)),
        (AlertTarget(host="node", gpu="device"), {"node": "a", "device": "nvidia1"}, ("a-w2", None)),
        (AlertTarget(host="node", gpu="device"), {"node": "a", "device": "GPU-deadbeef"}, (None, None)),
        (AlertTarget(worker="pod", host="node"), {"node": "b"}, (None, "b")),
    ],
)
def test_labels_name_a_worker_or_a_host_that_is_there(
    target: str | AlertTarget | None, labels: dict[str, str], whom: tuple[str | None, str | None]
) -> None:
    assert aim(target, labels, JOB) == whom


def _event(
    settings: AlertSettings, *, saves: bool = True, preempts: bool = True, wanted: str | None = None, **labels: str
) -> AlertFired:
    notice = Notice(source="alertmanager", name="Xid", fingerprint="f", labels=labels, wanted=wanted, where="$.x")
    event = event_of(notice, settings, JOB, saves=saves, preempts=preempts, now=1.0)
    assert isinstance(event, AlertFired)
    return event


def test_the_first_rule_that_matches_counts() -> None:
    settings = AlertSettings(
        rules=(
            AlertRule(match={"alertname": "~Gpu.*", "severity": "page"}, answer="fail"),
            AlertRule(match={"alertname": "~Gpu"}, answer="stop"),
            AlertRule(match={"alertname": "~Gpu.*"}, answer="drain", deadline_s=5.0),
        )
    )
    assert _event(settings, alertname="GpuXid", severity="page", worker="b-w0").answer == "fail"
    event = _event(settings, alertname="GpuXid", worker="b-w0")
    assert (event.answer, event.worker_id, event.deadline_s) == ("drain", "b-w0", 5.0)
    # A rule of this job counts before what the alert says of itself.
    assert _event(settings, wanted="abort", alertname="GpuXid", worker="b-w0").answer == "drain"
    assert _event(settings, wanted="abort", alertname="Other").answer == "abort"
    assert _event(settings, alertname="Other", worker="b-w0").answer == "report"


def test_an_answer_that_cannot_be_given_is_a_report_that_says_why() -> None:
    nobody = _event(AlertSettings(), wanted="drain", host="elsewhere")
    assert (nobody.answer, nobody.note) == (
        "report",
        "nothing to drain: its labels name no worker and no host of this job",
    )
    unsaved = _event(AlertSettings(), wanted="preempt", saves=False)
    assert (unsaved.answer, unsaved.note) == ("report", "no preempt: no worker takes checkpoints")
    off = _event(AlertSettings(), wanted="preempt", preempts=False)
    assert (off.answer, off.note) == ("report", "no preempt: no active technique answers it")
    assert _event(AlertSettings(), wanted="preempt").answer == "preempt"


@pytest.mark.parametrize(
    "settings",
    [
        AlertSettings(rules=(AlertRule(answer="preempt"),)),
        AlertSettings(hooks={"pager": Hook(answer="preempt")}),
        AlertSettings(hooks={"pager": Hook(value="state", answers={"down": "preempt"})}),
    ],
)
def test_rules_that_preempt_need_the_technique_that_sees_it_through_P8(settings: AlertSettings) -> None:
    chosen = defaults(Alerts(settings))
    chosen.check()
    without = Chosen([each for name, each in chosen.by_name.items() if name != "preemption"])
    with pytest.raises(ConfigError, match=r"technique alerts: .*let preemption be on"):
        without.check()


RUNNING = replace(
    JOB, generation=Generation(number=1, nonce="n", members=(JOB.workers[0].member, JOB.workers[3].member))
)


def test_a_deadline_counts_from_when_the_alert_came() -> None:
    alert = AlertFired(
        source="s", name="n", fingerprint="f", answer="preempt", deadline_s=30.0, reason="r", time=1000.0
    )
    (action,) = AlertPolicy().decide(RUNNING, alert)[:1]
    assert action == Preempt(deadline=1030.0, reason="r")
    drain = replace(alert, answer="drain", worker_id="b-w0")
    (action,) = AlertPolicy().decide(RUNNING, drain)[:1]
    assert action == Drain(worker_id="b-w0", deadline_s=30.0, reason="r")


@pytest.mark.parametrize("answer", ["stop", "checkpoint", "preempt", "report"])
def test_a_job_that_makes_room_already_does_no_more_about_an_alert(answer: str) -> None:
    ending = replace(RUNNING, preempting=PreemptionOrder(reason="before"))
    alert = AlertFired(source="s", name="n", fingerprint="f", reason="r")
    assert AlertPolicy().decide(ending, replace(alert, answer=answer)) == ()


def test_nobody_is_sent_to_meet_again_while_a_replacement_is_waited_for() -> None:
    alert = AlertFired(source="s", name="n", fingerprint="f", answer="abort", reason="r")
    assert AlertPolicy().decide(replace(RUNNING, holding=1), alert) == ()
    assert AlertPolicy().decide(JOB, alert) == ()
    assert len(AlertPolicy().decide(RUNNING, alert)) == 1


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+b", "(a*)*b", "(.*a){20}b"])
def test_no_alert_keeps_the_lighthouse_busy_with_a_rule(pattern: str) -> None:
    began = time.process_time()
    assert not matches(f"~{pattern}", "a" * 2048)
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    ("wanted", "value", "expected"),
    [
        ("~critical|page", "page", True),
        ("~critical|page", "pages", False),
        ("~(?i)node-[0-9]+", "NODE-17", True),
        ("~.*\u20ac", "100 \u20ac", True),
        ("~", "", True),
        ("critical|page", "page", False),
    ],
)
def test_a_regular_expression_is_for_the_whole_value(wanted: str, value: str, expected: bool) -> None:
    assert matches(wanted, value) is expected
