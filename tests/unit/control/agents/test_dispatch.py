from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from craft.control.agents.dispatch import Dispatch, directive_of
from craft.decide.job.state import JobState, WorkerView
from craft.protocol.actions import Stop
from craft.protocol.heartbeats import Pace, Update
from craft.protocol.membership import Generation, Member
from craft.protocol.messages import Directive
from craft.wire.codec import decode, unpack
from craft.wire.deltas import updated


def state_with(number: int) -> JobState:
    member = Member(worker_id="w0")
    return JobState(
        slots=1,
        workers=(WorkerView(member=member, standing="member"),),
        generation=Generation(number=number, nonce="x", members=(member,)),
    )


async def until(true: Callable[[], bool]) -> None:
    """Let the other tasks run until something is so."""
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be so")


def run_with(dispatch: Dispatch, story: Callable[[list[Directive]], Awaitable[None]]) -> list[Directive]:
    """Return what one listener got during ``story``."""

    async def main() -> list[Directive]:
        got: list[Directive] = []

        async def send(text: str | bytes) -> None:
            message = decode(text)
            assert isinstance(message, Directive)
            got.append(message)

        serving = asyncio.create_task(dispatch.serve(send))
        await story(got)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return got

    return asyncio.run(main())


def test_whoever_connects_gets_the_current_directive() -> None:
    dispatch = Dispatch(first_sequence=10)
    dispatch.tell(state_with(3))

    async def story(got: list[Directive]) -> None:
        await until(lambda: len(got) == 1)

    got = run_with(dispatch, story)
    assert got == [dispatch.directive]
    assert got[0].sequence == 11


def test_nothing_is_sent_before_there_is_anything_to_say() -> None:
    async def story(got: list[Directive]) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    assert run_with(Dispatch(first_sequence=0), story) == []


def test_the_same_target_is_not_sent_twice_and_sequences_grow() -> None:
    dispatch = Dispatch(first_sequence=0)

    async def story(got: list[Directive]) -> None:
        for number in (1, 1, 2):
            dispatch.tell(state_with(number))
            await until(lambda: bool(got) and got[-1] == dispatch.directive)

    got = run_with(dispatch, story)
    assert [(one.sequence, one.generation and one.generation.number) for one in got] == [(1, 1), (2, 2)]


def test_a_slow_agent_delays_nobody_and_gets_only_the_latest() -> None:
    async def main() -> tuple[list[str | bytes], list[str | bytes]]:
        dispatch, gate = Dispatch(first_sequence=0), asyncio.Event()
        slow: list[str | bytes] = []
        fast: list[str | bytes] = []

        async def send_slow(text: str | bytes) -> None:
            slow.append(text)
            await gate.wait()

        async def send_fast(text: str | bytes) -> None:
            fast.append(text)

        tasks = [asyncio.create_task(dispatch.serve(send)) for send in (send_slow, send_fast)]
        for number in range(1, 6):
            dispatch.tell(state_with(number))
            await until(lambda: len(fast) == number)  # noqa: B023
        gate.set()
        await until(lambda: len(slow) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return slow, fast

    slow, fast = asyncio.run(main())
    assert slow == [fast[0], fast[-1]]


def test_every_lost_worker_is_fenced_and_a_stop_says_why() -> None:
    lost = WorkerView(member=Member(worker_id="w1"), standing="lost")
    stop = Stop(reason="enough", exit_code=3, traceback="...")
    directive = directive_of(JobState(slots=1, workers=(lost,), stopping=stop), sequence=7)
    assert directive.fenced == ("w1",)
    assert (directive.stopping, directive.exit_code, directive.reason, directive.traceback) == (
        True,
        3,
        "enough",
        "...",
    )


def test_a_large_directive_is_whole_and_packed_once_and_then_an_update_for_each_who_has_it() -> None:
    def large(number: int, workers: int) -> JobState:
        members = tuple(Member(worker_id=f"w{each}") for each in range(workers))
        return JobState(slots=1, generation=Generation(number=number, nonce="x", members=members))

    async def main() -> tuple[list[str | bytes], list[str | bytes]]:
        dispatch = Dispatch(first_sequence=0)
        early: list[str | bytes] = []
        late: list[str | bytes] = []

        async def send_early(data: str | bytes) -> None:
            early.append(data)

        async def send_late(data: str | bytes) -> None:
            late.append(data)

        tasks = [asyncio.create_task(dispatch.serve(send_early))]
        for number in (1, 2):
            dispatch.tell(large(number, 1001 - number))
            await until(lambda: len(early) == number)  # noqa: B023
        tasks.append(asyncio.create_task(dispatch.serve(send_late)))
        await until(lambda: len(late) == 1)
        dispatch.tell(large(3, 998))
        await until(lambda: len(early) == 3 and len(late) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return early, late

    early, late = asyncio.run(main())
    assert [type(data) for data in early] == [bytes, str, str]
    assert [type(data) for data in late] == [bytes, str]
    whole, update = unpack(late[0]), unpack(early[1])
    first = unpack(early[0])
    assert isinstance(update, Update) and isinstance(first, Directive)
    assert updated(first, update) == whole
    # The same bytes for both, made once.
    assert early[2] is late[1]


def test_a_connection_begins_at_the_default_pace_and_hears_of_every_other_one() -> None:
    dispatch = Dispatch(first_sequence=0)

    async def main() -> list[str | bytes]:
        got: list[str | bytes] = []

        async def send(data: str | bytes) -> None:
            got.append(data)

        serving = asyncio.create_task(dispatch.serve(send))
        for heartbeat_s in (0.1, 0.25, 0.25, 0.1):
            dispatch.set_pace(Pace(heartbeat_s=heartbeat_s))
            for _ in range(10):
                await asyncio.sleep(0)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return got

    assert [unpack(data) for data in asyncio.run(main())] == [Pace(heartbeat_s=0.25), Pace(heartbeat_s=0.1)]
