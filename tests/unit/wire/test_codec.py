"""P6: whatever arrives, a message comes out or MalformedMessage does, and nothing else."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from craft.protocol.errors import MalformedMessage
from craft.protocol.events import WorkerFailed
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Broken, Directive, Exited, FailureReport, HostReport, WorkerReport
from craft.wire.codec import MAX_MESSAGE_BYTES, Message, decode, decode_as, encode, frame, frame_size

MEMBER = Member(worker_id="w0", host="a", address="10.0.0.1", store_port=5)
REPORT = HostReport(
    host="a",
    pid=4,
    sequence=9,
    workers=(
        WorkerReport(
            member=MEMBER,
            pid=7,
            joined=True,
            metrics={"loss": 0.5},
            broken=Broken(generation=1, detail="reset"),
            failed=WorkerFailed(worker_id="w0", error="E", traceback="T", step=1),
        ),
    ),
    exited=(Exited(worker_id="w0", exit_code=None, signal=9, time=1.5),),
)
DIRECTIVE = Directive(sequence=1, generation=Generation(number=1, nonce="x", members=(MEMBER,)), fenced=("w1",))
VALID = [encode(message) for message in (REPORT, REPORT.workers[0], DIRECTIVE)]


@pytest.mark.parametrize("message", [REPORT, REPORT.workers[0], DIRECTIVE])
def test_a_message_survives_the_way(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(encode(message).decode()) == message
    framed = frame(message)
    assert frame_size(framed[:4]) == len(framed) - 4


@given(st.binary(max_size=300))
def test_random_bytes_are_malformed_P6(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)
    with contextlib.suppress(MalformedMessage):
        decode_as(data, FailureReport)


@given(st.text(max_size=200))
def test_random_text_is_malformed_P6(data: str) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


@given(st.sampled_from(VALID), st.data())
def test_a_mutated_message_is_a_message_or_malformed_P6(valid: bytes, data: st.DataObject) -> None:
    mutated = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        lo = data.draw(st.integers(0, len(mutated)))
        hi = data.draw(st.integers(lo, min(len(mutated), lo + 12)))
        mutated[lo:hi] = data.draw(st.binary(max_size=12))
    with contextlib.suppress(MalformedMessage):
        assert isinstance(decode(bytes(mutated)), HostReport | WorkerReport | Directive)


@pytest.mark.parametrize("data", ["\ud800", b"[" * 100_000, b'{"type":' * 50_000, b"\xff\xfe", b""])
def test_hostile_input_is_malformed_P6(data: bytes | str) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


def test_a_message_over_the_limit_is_refused_before_it_is_read_P6() -> None:
    with pytest.raises(MalformedMessage, match="over the limit"):
        decode(b" " * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(MalformedMessage, match="over the limit"):
        frame_size(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b'{"type":"HostReport","host":"a","pid":"x","sequence":1}', "$.pid"),
        (b'{"type":"HostReport","host":"a","pid":1}', "$.sequence"),
        (b'{"type":"HostReport","host":"a","pid":1,"sequence":1,"workers":[{}]}', "$.workers[0].member"),
        (b'{"type":"Nonsense"}', "$.type"),
        (b"{", ""),
    ],
)
def test_the_error_names_the_field(data: bytes, field: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode(data)
    assert caught.value.field == field


def test_unknown_fields_of_a_failure_report_are_named() -> None:
    with pytest.raises(MalformedMessage) as caught:
        decode_as(b'{"worker":"w0"}', FailureReport)
    assert caught.value.field == "$.worker"


def test_text_that_cannot_be_encoded_does_not_break_the_report() -> None:
    failed = WorkerFailed(worker_id="w0", error="no file \udcff", traceback="é \udcff")
    arrived = decode(encode(WorkerReport(member=MEMBER, pid=1, failed=failed)))
    assert isinstance(arrived, WorkerReport)
    assert arrived.failed == WorkerFailed(worker_id="w0", error="no file ?", traceback="é ?")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_finite_number_does_not_break_the_report(value: float) -> None:
    report = WorkerReport(member=MEMBER, pid=1, metrics={"loss": value, "rate": 0.1}, step_s=value)
    expected = WorkerReport(member=MEMBER, pid=1, metrics={"rate": 0.1})
    assert decode(encode(report)) == expected
    assert decode(encode(HostReport(host="a", pid=1, sequence=1, workers=(report,)))) == HostReport(
        host="a", pid=1, sequence=1, workers=(expected,)
    )
