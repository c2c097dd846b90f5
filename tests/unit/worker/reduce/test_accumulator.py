"""From backward into the worker's own buffers: the sums are those of the tree, bit for bit, however they come about."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from craft.decide.step.tree import Node, cover, fold
from craft.protocol.errors import ConfigError
from craft.worker.reduce.accumulator import GradientAccumulator
from craft.worker.reduce.buckets import BucketLayout
from craft.worker.reduce.flats import Flats


class Model(torch.nn.Module):
    """Three parameters; small buckets keep each in its own, large ones keep all in one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.params = torch.nn.ParameterList(
            torch.randn(size, generator=generator).to(dtype) for size in ((3,), (2, 2), (5,))
        )

    def loss(self, microbatch: int, *used: int) -> torch.Tensor:
        """A loss whose gradient is different, and never exact, for every microbatch and parameter."""
        total = torch.zeros((), dtype=self.params[0].dtype)
        for index in used or range(len(self.params)):
            total = total + (self.params[index] * (microbatch + 0.1)).sin().sum() * (index + 0.7)
        return total


def gradients_of(model: Model, bucket_bytes: int = 1) -> GradientAccumulator:
    return GradientAccumulator(BucketLayout(list(model.params), bucket_bytes))


def flat(gradients: GradientAccumulator, node: Node) -> torch.Tensor:
    return torch.cat([tensor.view(-1) for tensor in gradients.nodes[node].tensors]).clone()


def plain(model: Model, losses: list[torch.Tensor], weight: float = 1.0) -> torch.Tensor:
    """What plain autograd accumulates, in the order of the buckets; an absent gradient, or one of weight 0, is +0.0."""
    for param in model.params:
        param.grad = None
    for loss in losses:
        torch.autograd.backward(loss)
    grads = [param.grad if param.grad is not None and weight else torch.zeros_like(param) for param in model.params]
    for param in model.params:
        param.grad = None
    return torch.cat([(grad if weight == 1.0 else grad * weight).view(-1) for grad in reversed(grads)])


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().view(torch.uint8).tolist())


def hold(
    gradients: GradientAccumulator, microbatch: int, size: int, *losses: torch.Tensor, weight: float = 1.0
) -> None:
    gradients.start(microbatch, size, None)
    gradients.weigh(weight)
    for loss in losses:
        torch.autograd.backward(loss)
    gradients.finish()


orders = st.integers(1, 11).flatmap(
    lambda size: st.tuples(
        st.just(size), st.permutations(range(size)).flatmap(lambda order: st.integers(0, size).map(lambda n: order[:n]))
    )
)


@given(case=orders, dtype=st.sampled_from([torch.float32, torch.bfloat16]), bucket_bytes=st.sampled_from([1, 1 << 20]))
def test_what_is_held_is_the_sum_along_the_tree_for_any_order_of_holding(
    case: tuple[int, list[int]], dtype: torch.dtype, bucket_bytes: int
) -> None:
    """P1: a worker may come to hold its microbatches in any order, as others are lost."""
    size, held = case
    model = Model(dtype)
    leaves = {(m, m + 1): plain(model, [model.loss(m)]) for m in held}
    gradients = gradients_of(model, bucket_bytes)

    for microbatch in held:
        hold(gradients, microbatch, size, model.loss(microbatch))

    assert tuple(sorted(gradients.nodes)) == cover(held, size)
    for node in gradients.nodes:
        inside = {leaf: leaves[leaf] for leaf in leaves if node[0] <= leaf[0] < node[1]}
        expected = fold(inside, size, torch.add)
        assert expected is not None
        assert bits(flat(gradients, node)) == bits(expected)
    gradients.detach()


@given(
    backwards=st.lists(st.lists(st.sets(st.integers(0, 2), min_size=1), max_size=3), min_size=1, max_size=6),
    bucket_bytes=st.sampled_from([1, 1 << 20]),
)
def test_any_number_of_backward_calls_over_any_parameters_gives_what_autograd_accumulates(
    backwards: list[list[set[int]]], bucket_bytes: int
) -> None:
    """P1: the guess when a bucket is full depends on the microbatch before, which is not the same on every worker."""
    model = Model()
    gradients = gradients_of(model, bucket_bytes)
    size = len(backwards)

    for microbatch, calls in enumerate(backwards):
        expected = plain(model, [model.loss(microbatch, *sorted(used)) for used in calls])
        gradients.clear()
        gradients.start(microbatch, size, lambda _: None)
        for used in calls:
            torch.autograd.backward(model.loss(microbatch, *sorted(used)))
        leaf = gradients.finish()

        assert bits(flat(gradients, (microbatch, microbatch + 1))) == bits(expected)
        present = set().union(*calls) if calls else set()
        assert leaf.present == sum(1 << index for index in present).to_bytes(1, "little")
    gradients.detach()


@given(
    used=st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=6),
    weights=st.lists(st.sampled_from([0.0, 0.3, 1.0, 7.0]), min_size=6, max_size=6),
    bucket_bytes=st.sampled_from([1, 1 << 20]),
)
def test_a_weight_does_not_care_which_parameters_the_microbatch_before_used(
    used: list[set[int]], weights: list[float], bucket_bytes: int
) -> None:
    model = Model()
    gradients = gradients_of(model, bucket_bytes)

    for microbatch, (indices, weight) in enumerate(zip(used, weights, strict=False)):
        losses = [model.loss(microbatch, *sorted(indices))] if indices else []
        expected = plain(model, losses, weight)
        gradients.clear()
        hold(gradients, microbatch, len(used), *([model.loss(microbatch, *sorted(indices))] if indices else []),
             weight=weight)  # fmt: skip
        assert bits(flat(gradients, (microbatch, microbatch + 1))) == bits(expected)
    gradients.detach()


def flushed_in(gradients: GradientAccumulator, microbatch: int, *losses: torch.Tensor) -> tuple[list[int], int]:
    """Which buckets were flushed, and how many of them while backward was going on."""
    flushed: list[int] = []
    gradients.start(microbatch, 8, flushed.append)
    for loss in losses:
        torch.autograd.backward(loss)
    early = len(flushed)
    gradients.finish()
    return flushed, early


def test_the_first_microbatch_is_flushed_at_its_end_and_later_ones_during_backward() -> None:
    model = Model()
    gradients = gradients_of(model)

    assert flushed_in(gradients, 0, model.loss(0))[1] == 0
    assert flushed_in(gradients, 1, model.loss(1))[1] == 3


def test_every_bucket_is_flushed_exactly_once() -> None:
    model = Model()
    gradients = gradients_of(model)

    for microbatch, used in enumerate([(0, 1, 2), (0,), (), (1, 2), (0, 1, 2)]):
        losses = [model.loss(microbatch, *used)] * (2 if microbatch == 4 else 1) if used else []
        flushed, _ = flushed_in(gradients, microbatch, *losses[:1])
        assert sorted(flushed) == [0, 1, 2]


def test_a_gradient_after_its_bucket_was_flushed_is_told_as_late() -> None:
    model = Model()
    gradients = gradients_of(model)
    hold(gradients, 0, 4, model.loss(0))

    gradients.start(1, 4, lambda _: None)
    torch.autograd.backward(model.loss(1))
    on_time = gradients.finish()
    gradients.start(2, 4, lambda _: None)
    torch.autograd.backward(model.loss(2))
    torch.autograd.backward(model.loss(3))
    late = gradients.finish()

    assert (on_time.late, late.late) == (False, True)


def test_a_microbatch_without_data_does_not_make_the_next_one_late() -> None:
    """A stream that has ended says nothing about how the others are computed."""
    model = Model()
    gradients = gradients_of(model, 1 << 20)
    hold(gradients, 0, 4, model.loss(0))

    empty = gradients.hold_empty(1, 4)
    gradients.start(2, 4, lambda _: None)
    torch.autograd.backward(model.loss(2))
    leaf = gradients.finish()

    assert empty.present == b"\0"
    assert not leaf.late


def test_a_second_backward_of_a_weighted_microbatch_that_nobody_expected_is_an_error_that_says_what_to_do() -> None:
    model = Model()
    gradients = gradients_of(model)
    hold(gradients, 0, 4, model.loss(0))
    gradients.start(1, 4, None)
    gradients.weigh(2.5)
    torch.autograd.backward(model.loss(1))

    with pytest.raises(ConfigError, match=r"call backward\(\) once per microbatch, or equally often in each"):
        torch.autograd.backward(model.loss(1))


def test_a_microbatch_of_weight_0_is_present_and_counts_for_nothing() -> None:
    """Not even where its gradient is no number, as that of a mean over no tokens, and however late it comes."""
    model = Model()
    gradients = gradients_of(model)
    hold(gradients, 0, 4, model.loss(0))
    gradients.start(1, 4, lambda _: None)
    gradients.weigh(0.0)
    torch.autograd.backward(model.loss(1) * float("nan"))
    torch.autograd.backward(-model.loss(1))
    leaf = gradients.finish()

    assert (leaf.present, leaf.weight, leaf.late) == (bytes([0b111]), 0.0, False)
    assert [bits(each) for each in leaf.flats.tensors] == [bits(torch.zeros_like(each)) for each in leaf.flats.tensors]


def test_a_weight_after_backward_has_begun_is_refused() -> None:
    model = Model()
    gradients = gradients_of(model)
    gradients.start(0, 2, None)
    torch.autograd.backward(model.loss(0))

    with pytest.raises(ConfigError, match=r"step.weight\(n\) must be called before backward\(\)"):
        gradients.weigh(3.0)


def test_a_parameter_that_is_used_twice_counts_once() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)))
    inputs = torch.arange(6.0).reshape(2, 3) / 7

    def loss() -> torch.Tensor:
        return (inputs @ weight @ weight.t()).sin().sum()

    torch.autograd.backward(loss())
    assert weight.grad is not None
    expected = bits(weight.grad.view(-1))
    gradients = GradientAccumulator(BucketLayout([weight], 1024))
    for microbatch in range(2):
        gradients.clear()
        hold(gradients, microbatch, 4, loss())
        assert bits(flat(gradients, (microbatch, microbatch + 1))) == expected


def test_a_frozen_parameter_has_no_place_and_is_absent() -> None:
    model = Model()
    model.params[1].requires_grad_(False)
    gradients = gradients_of(model)

    gradients.start(0, 2, None)
    torch.autograd.backward(model.loss(0))
    leaf = gradients.finish()

    assert leaf.present == bytes([0b101])
    assert len(flat(gradients, (0, 1))) == 8


def test_sparse_gradients_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    gradients = GradientAccumulator(BucketLayout(list(embedding.parameters()), 1024))
    gradients.start(0, 1, None)
    embedding(torch.tensor([1])).sum().backward()

    with pytest.raises(ConfigError, match="build the embedding with sparse=False"):
        gradients.finish()


def test_backward_outside_of_a_microbatch_is_nobodys_business() -> None:
    model = Model()
    gradients_of(model)

    torch.autograd.backward(model.loss(0))

    assert all(param.grad is not None for param in model.params)


def test_a_detached_layout_takes_no_gradients() -> None:
    model = Model()
    gradients = gradients_of(model)
    gradients.detach()

    gradients.start(0, 1, None)
    torch.autograd.backward(model.loss(0))

    assert all(param.grad is not None for param in model.params)


def test_memory_does_not_grow_with_the_number_of_microbatches() -> None:
    model = Model()
    gradients = gradients_of(model)

    for microbatch in range(16):
        hold(gradients, microbatch, 16, model.loss(microbatch))
        assert len(gradients.nodes) <= 4

    assert list(gradients.nodes) == [(0, 16)]


def test_what_is_computed_only_for_its_digest_is_not_held() -> None:
    model = Model()
    gradients = gradients_of(model)
    expected = bits(plain(model, [model.loss(0)]))
    gradients.start(0, 2, None)
    torch.autograd.backward(model.loss(0))

    found = gradients.discard(lambda flats: bytes(bits(torch.cat([each.view(-1) for each in flats.tensors]))))

    assert list(found) == expected
    assert gradients.nodes == {}


@given(case=orders, bucket_bytes=st.sampled_from([1, 1 << 20]))
def test_the_last_node_is_in_the_buffers_that_were_lent_and_they_are_never_taken_for_another(
    case: tuple[int, list[int]], bucket_bytes: int
) -> None:
    """P1: where the result takes the place of what was sent, step after step."""
    size, held = case
    model = Model()
    gradients, plainly = gradients_of(model, bucket_bytes), gradients_of(model, bucket_bytes)
    result = Flats(gradients.layout)
    for _ in range(2):
        for microbatch in held:
            gradients.start(microbatch, size, None, result if microbatch == held[-1] else None)
            model.loss(microbatch).backward()
            last = gradients.finish()
            assert (gradients.nodes[last.node] is result) == (microbatch == held[-1])
            hold(plainly, microbatch, size, model.loss(microbatch))
        assert gradients.nodes.keys() == plainly.nodes.keys()
        for node in plainly.nodes:
            assert bits(flat(gradients, node)) == bits(flat(plainly, node))
        gradients.clear()
        plainly.clear()
        assert result not in gradients._pool


def test_buffers_that_only_a_retry_needed_are_let_go() -> None:
    model = Model()
    gradients = gradients_of(model)
    for microbatches in (range(8), range(1), range(1)):
        for microbatch in microbatches:
            hold(gradients, microbatch, 8, model.loss(microbatch))
        gradients.clear()
    assert len(gradients._pool) == 1
