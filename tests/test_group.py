"""Collectives between threads and processes: values, derivatives, and errors that end all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from funcllm.group import SINGLE, Group, all_gather, all_reduce, all_reduce_max, process_group, run_threads

X = torch.arange(1.0, 13.0).view(4, 3).sin()


def shard(group: Group, x: Tensor = X) -> Tensor:
    """This rank's rows of a whole tensor."""
    return x.chunk(group.size)[group.rank]


@pytest.mark.parametrize("tp", [2, 4])
def test_collectives_give_every_rank_the_whole(tp: int) -> None:
    def run(group: Group) -> list[Tensor]:
        mine = shard(group)
        row = mine.sum(0) * (group.rank + 1)
        return [
            all_reduce(row, group),
            all_reduce_max(row, group),
            all_gather(mine, group),
            all_gather(mine.T, group, dim=1),
            all_gather(mine.T.unsqueeze(0), group, dim=-1),
        ]

    rows = torch.stack([(rank + 1) * piece.sum(0) for rank, piece in enumerate(X.chunk(tp))])
    for got in run_threads(run, tp):
        for ours, expected in zip(got, [rows.sum(0), rows.amax(0), X, X.T, X.T[None]]):
            torch.testing.assert_close(ours, expected)


def test_a_single_rank_gets_its_tensor_back() -> None:
    assert all_reduce(X, SINGLE) is X
    assert all_reduce_max(X, SINGLE) is X
    assert all_gather(X, SINGLE, dim=1) is X


def test_results_are_out_of_place() -> None:
    def run(group: Group) -> tuple[Tensor, Tensor]:
        x = torch.full((2,), float(group.rank))
        total = all_reduce(x, group)
        total += 100.0
        return x, all_reduce_max(x, group)

    for rank, (x, largest) in enumerate(run_threads(run, 2)):
        assert x.tolist() == [rank, rank]
        assert largest.tolist() == [1.0, 1.0]


def test_the_sum_is_in_rank_order_and_integers_are_exact() -> None:
    def run(group: Group) -> tuple[Tensor, Tensor]:
        big = torch.tensor([2**62 - 1 if group.rank == 0 else 1])
        return all_reduce(big, group), all_reduce(torch.tensor([[1e8, 1.0, -1e8][group.rank]]), group)

    for integers, floats in run_threads(run, 3):
        assert integers.item() == 2**62 + 1
        assert floats.item() == ((torch.tensor(1e8) + 1.0) - 1e8).item()


def test_a_rank_outside_its_group_is_refused() -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank {rank} is not among the 2 ranks"):
            Group(rank, 2)
    with pytest.raises(ValueError, match="call init_process_group first or use SINGLE"):
        process_group()


# --- derivatives -----------------------------------------------------------------------------------------------------


def loss_of_reduce(rows: Tensor, group: Group) -> Tensor:
    """sum(sin(sum of all rows' squares)), computed in full on every rank."""
    return all_reduce(rows.square().sum(0), group).sin().sum()


def loss_of_gather(rows: Tensor, group: Group) -> Tensor:
    whole = all_gather(rows.exp(), group)
    return (whole[0] * whole[3] + whole[1:].sum(0).sin()).sum()


LOSSES = (loss_of_reduce, loss_of_gather)
losses = pytest.mark.parametrize("loss", LOSSES)
Loss = Callable[[Tensor, Group], Tensor]


def autograd(loss: Loss, group: Group) -> Tensor:
    rows = shard(group).clone().requires_grad_()
    loss(rows, group).backward()
    assert rows.grad is not None
    return rows.grad


def functional(loss: Loss, group: Group) -> Tensor:
    return torch.func.grad(loss)(shard(group), group)


def pulled(loss: Loss, group: Group) -> Tensor:
    _, pull = torch.func.vjp(lambda rows: loss(rows, group), shard(group))
    return pull(torch.tensor(1.0))[0]


@losses
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("derivative", [autograd, functional, pulled])
def test_gradients_are_tp_times_those_of_one_rank(derivative: Any, loss: Loss, tp: int) -> None:
    expected = torch.func.grad(loss)(X, SINGLE)
    assert expected.abs().min() > 1e-4
    got = torch.cat(run_threads(lambda group: derivative(loss, group) / tp, tp))
    torch.testing.assert_close(got, expected)


@losses
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_reduces_each_example(loss: Loss, dim: int) -> None:
    examples = torch.stack([X, X * 2, X - 1], dim)

    def run(group: Group) -> tuple[Tensor, Tensor]:
        mine = torch.stack([shard(group, x) for x in examples.unbind(dim)], dim)
        values = torch.func.vmap(lambda rows: loss(rows, group), in_dims=dim)(mine)
        gradients = torch.func.vmap(torch.func.grad(lambda rows: loss(rows, group)), in_dims=dim)(mine)
        return values, gradients / group.size

    expected = [loss(x, SINGLE) for x in examples.unbind(dim)]
    results = run_threads(run, 2)
    for values, _ in results:
        torch.testing.assert_close(values, torch.stack(expected))
    gradients = torch.cat([gradient for _, gradient in results], dim=1)
    torch.testing.assert_close(gradients, torch.stack([torch.func.grad(loss)(x, SINGLE) for x in examples.unbind(dim)]))


def test_vmap_of_a_gather_along_any_dim() -> None:
    examples = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))

    def run(group: Group) -> list[Tensor]:
        mine = examples.chunk(2, 1)[group.rank]
        return [
            torch.func.vmap(partial(all_gather, group=group, dim=dim), in_dims=in_dim)(mine.movedim(0, in_dim))
            for dim in (0, -2)
            for in_dim in (0, 1, 2)
        ]

    for results in run_threads(run, 2):
        for got in results:
            torch.testing.assert_close(got, examples)


def test_no_gradient_is_asked_for_without_need() -> None:
    def run(group: Group) -> tuple[bool, bool, bool]:
        x = X.clone().requires_grad_()
        with torch.no_grad():
            inside = all_reduce(x, group).requires_grad
        return all_reduce(x, group).requires_grad, inside, all_reduce(X, group).requires_grad

    assert run_threads(run, 2) == [(True, False, False)] * 2


# --- errors ----------------------------------------------------------------------------------------------------------


def ends_in_time(fn: Callable[[Group], Any], tp: int, error: type[BaseException], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=message):
        run_threads(fn, tp)
    assert time.monotonic() - start < 10
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_of_one_rank_ends_all(bad: int) -> None:
    def run(group: Group) -> Tensor:
        x = all_reduce(X, group)
        if group.rank == bad:
            raise KeyError(f"rank {bad} broke")
        return all_reduce(all_reduce(x, group), group)

    ends_in_time(run, 3, KeyError, f"rank {bad} broke")


def test_an_error_in_a_backward_pass_ends_all() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise OSError("no gradient here")

    def run(group: Group) -> None:
        x = X.clone().requires_grad_()
        y = Broken.apply(x) if group.rank == 1 else x
        all_reduce(all_reduce(y, group), group).sum().backward()
        all_reduce(X, group)

    ends_in_time(run, 2, OSError, "no gradient here")


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_returns_early_does_not_leave_the_others_waiting(early: int) -> None:
    def run(group: Group) -> Tensor:
        return X if group.rank == early else all_reduce(X, group)

    ends_in_time(run, 2, RuntimeError, f"rank {early} returned while others wait in a collective")


def test_the_lowest_rank_with_an_error_is_the_one_that_is_raised() -> None:
    barrier = threading.Barrier(2)

    def run(group: Group) -> None:
        barrier.wait()
        raise ValueError(f"from {group.rank}")

    ends_in_time(run, 2, ValueError, "from 0")


def test_threads_inherit_the_callers_grad_mode() -> None:
    with torch.no_grad():
        assert run_threads(lambda group: torch.is_grad_enabled(), 2) == [False, False]
    assert run_threads(lambda group: torch.is_grad_enabled(), 2) == [True, True]


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_process_group_of_one_is_single(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert process_group() is SINGLE
    finally:
        torch.distributed.destroy_process_group()


def _derivatives(loss: Loss, group: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """Ours and a single rank's: gradient, forward derivative, Hessian-vector product (reverse brings a factor tp)."""
    along, mine = X.cos(), shard(group)

    def product(rows: Tensor, direction: Tensor, group: Group) -> Tensor:
        gradient = torch.func.grad(lambda x: loss(x, group))
        return torch.func.jvp(gradient, (rows,), (direction,))[1] / group.size

    def forward(rows: Tensor, direction: Tensor, group: Group) -> Tensor:
        return torch.func.jvp(lambda x: loss(x, group), (rows,), (direction,))[1]

    return {
        "gradient": (functional(loss, group) / group.size, shard(group, functional(loss, SINGLE))),
        "forward": (forward(mine, shard(group, along), group), forward(X, along, SINGLE)),
        "second": (product(mine, shard(group, along), group), shard(group, product(X, along, SINGLE))),
    }


def _in_process(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=size)
    try:
        group = process_group()
        assert (group.rank, group.size) == (rank, size)
        compiled = torch.compile(lambda x: all_reduce(x.sin(), group), backend="eager", fullgraph=True)
        results = {
            **{f"{name} {loss.__name__}": pair for loss in LOSSES for name, pair in _derivatives(loss, group).items()},
            "gathered": (all_gather(shard(group).T, group, dim=1), X.T),
            "largest": (all_reduce_max(torch.tensor([rank]), group), torch.tensor([size - 1])),
            "compiled": (compiled(X), X.sin() * size),
        }
        for name, (got, wanted) in results.items():
            torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}")
        (torch.zeros(1)).numpy().tofile(f"{path}/done{rank}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_collectives_between_processes(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(_in_process, args=(2, str(tmp_path)), nprocs=2)
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()
