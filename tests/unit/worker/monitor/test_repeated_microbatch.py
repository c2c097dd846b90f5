"""Which microbatch is computed twice, and what a stream gives for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from craft.decide.step.combine import combine
from craft.decide.step.ledger import Ledger
from craft.protocol.control_word import Word
from craft.protocol.errors import BitsDiffer
from craft.worker.data.sources import StreamSource
from craft.worker.monitor.consistency import ConsistencyCheck, sample_of
from craft.worker.monitor.repeated_microbatch import PROBE, RepeatedMicrobatch, is_extra, is_repeat, place_of, repeat_of

from ..alone import alone, model, train

LEDGER = Ledger(worker_id="w1", members=("w0", "w1", "w2"), owners=(0, 0, 1, 1, 2, 2))


def at(step: int) -> RepeatedMicrobatch:
    repeats = RepeatedMicrobatch(True)
    for number in range(step + 1):
        repeats.begin(number)
    return repeats


def test_what_stands_for_a_microbatch_tells_which_one_it_is() -> None:
    assert place_of(PROBE) == 0 and is_extra(PROBE) and not is_repeat(PROBE)
    for microbatch in range(4):
        assert place_of(microbatch) == place_of(repeat_of(microbatch)) == microbatch
        assert is_repeat(repeat_of(microbatch)) and not is_extra(microbatch)


def test_it_is_one_of_the_next_worker_before_any_of_its_own() -> None:
    assert at(2).due(LEDGER) is None
    assert at(3).due(LEDGER) == repeat_of(4)
    assert at(3).due(replace(LEDGER, held=frozenset({2}))) is None
    assert at(3).due(replace(LEDGER, owners=(0, 0, 1, 1, 1, 1))) == repeat_of(0)
    assert at(3).due(replace(LEDGER, idle=frozenset({"w1"}))) is None


def test_alone_it_is_its_own_first_one() -> None:
    ledger = Ledger(worker_id="w0", members=("w0",), owners=(0, 0))
    assert at(3).due(ledger) == repeat_of(0)


def test_after_a_disturbance_the_next_step_tries_again_and_not_for_ever() -> None:
    repeats = at(3)
    repeats.disturbed()
    assert repeats.due(LEDGER) is None
    repeats.committed(combine([Word(step=3)]))
    repeats.begin(4)
    # The other one may never answer: every second try is its own.
    assert repeats.due(LEDGER) == repeat_of(2)
    repeats.found(2, b"one")
    repeats.found(repeat_of(2), b"one")
    repeats.committed(combine([Word(step=4, computed=((2, b"one"),), repeated=((2, b"one"),))]))
    repeats.begin(5)
    assert not repeats.active
    assert [at(step).active for step in (7, 8)] == [True, False]


def test_where_kernels_may_vary_a_difference_is_only_warned_of() -> None:
    told: list[str] = []
    bits = ConsistencyCheck(True, 0, list, told.append, lambda: True)
    for step in range(4):
        bits.begin_step(step)
        bits.found(0, sample_of, b"one")
        bits.found(repeat_of(0), sample_of, b"other")
        assert not (bits.word_part().repeated or bits.word_part().computed)
        bits.committed()
    (text,) = told
    assert "torch.use_deterministic_algorithms(True)" in text


def counting(ignores_start: bool) -> Any:
    def stream(microbatch: int, num_microbatches: int, start_step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        step = 0 if ignores_start else start_step
        while True:
            value = float(step * num_microbatches + microbatch)
            yield torch.full((2, 3), value), torch.ones(2, 1)
            step += 1

    return stream


def test_a_stream_is_opened_anew_for_it_and_goes_on_as_if_it_had_not_been() -> None:
    source = StreamSource(counting(False), microbatches=2, seed=0, total_steps=9)
    found = [float(source.fetch(step, 1)[0][0, 0]) for step in range(3)]
    assert float(source.again(2, 1)[0][0, 0]) == found[2] == 5.0
    assert float(source.fetch(3, 1)[0][0, 0]) == 7.0


def test_alone_a_stream_that_ignores_its_start_ends_the_job_in_step_3() -> None:
    def run(ignores_start: bool) -> None:
        job = alone()
        net = job.replicate(model())
        for step in job.steps(counting(ignores_start), microbatches=2, steps=5):
            for batch in step:
                train(net, batch)
                assert step.microbatch is not None
                step.log(number=step.microbatch)
            # What is logged by the one that is computed again is not counted.
            assert step.metrics == {"number": 0.5}

    run(False)
    with pytest.raises(BitsDiffer, match="microbatch 0 of step 3 gave other bits when w0 computed it again"):
        run(True)


@pytest.mark.parametrize("check_bits", [True, False])
def test_state_that_is_carried_from_one_microbatch_to_the_next_is_found(check_bits: bool) -> None:
    job = alone(check_bits=check_bits)
    net = job.replicate(model())
    generator = torch.Generator().manual_seed(1)

    def run() -> None:
        for step in job.steps(counting(False), microbatches=2, steps=5):
            for x, y in step:
                train(net, (x + torch.randn(x.shape, generator=generator), y))

    if not check_bits:
        run()
        return
    with pytest.raises(BitsDiffer, match=r"a torch\.Generator of the script"):
        run()
