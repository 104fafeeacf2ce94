from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from funcllm.group import SINGLE, Group
from funcllm.qwen3 import param_specs
from funcllm.record import Layers
from funcllm.specs import (
    Staging,
    ahead,
    assemble,
    fill,
    init_params,
    init_part,
    is_spec,
    local_part_shape,
    local_shape,
    local_slices,
    map_specs,
    named,
    nbytes,
    normal_values,
    spec_leaves,
    specs_of,
    whole,
)
from funcllm.types import Params, Part, Spec
from tests.tiny import tiny_config


def spec(name: str, shape: tuple[int, ...], **options: Any) -> Spec:
    return Spec(parts=(Part(name=name, shape=shape, **options),))


def counting(name: str, slices: tuple[slice, ...]) -> Tensor:
    """A whole [20, 3] tensor of 0, 1, 2, ..., cut."""
    return torch.arange(60.0).view(20, 3)[slices]


# --- shapes ----------------------------------------------------------------------------------------------------------


@given(size=st.integers(0, 40), shards=st.sampled_from([1, 2, 4, 8]), replicas=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=60)
def test_the_slices_of_all_ranks_are_the_whole_axis_once_a_shard(size, shards, replicas):
    part = Part(name="w", shape=(3, size), axis=1, shards=shards)
    tp = shards * replicas
    slices = [local_slices(part, Group(rank, tp))[1] for rank in range(tp)]
    covered = [i for s in slices[::replicas] for i in range(s.start, s.stop)]
    assert covered == list(range(size))
    assert all(slices[rank] == slices[rank - rank % replicas] for rank in range(tp))
    widths = {local_part_shape(part, Group(rank, tp)) for rank in range(tp)}
    assert widths == {(3, -(-size // shards))}


def test_neighbours_hold_the_same_slice_when_there_are_fewer_shards_than_ranks():
    part = Part(name="k", shape=(8, 5), axis=0, shards=2)
    starts = [local_slices(part, Group(rank, 4))[0].start for rank in range(4)]
    assert starts == [0, 0, 4, 4]


def test_shards_that_do_not_go_over_the_ranks_are_refused():
    with pytest.raises(ValueError, match="k: 3 shards do not go over 4 ranks"):
        local_slices(Part(name="k", shape=(6,), axis=0, shards=3), Group(0, 4))
    with pytest.raises(ValueError, match="k: 2 shards do not go over 1 ranks"):
        local_slices(Part(name="k", shape=(6,), axis=0, shards=2), SINGLE)


def test_parts_concatenate_or_stack():
    parts = (Part(name="a", shape=(4, 3), axis=0, shards=2), Part(name="b", shape=(5, 3), axis=0, shards=2))
    assert local_shape(Spec(parts=parts), Group(0, 2)) == (2 + 3, 3)
    same = (parts[0], Part(name="c", shape=(4, 3), axis=0, shards=2))
    assert local_shape(Spec(parts=same, stack=True), Group(0, 2)) == (2, 2, 3)
    with pytest.raises(ValueError, match=r"parts do not stack: a \[2, 3\], b \[3, 3\]"):
        local_shape(Spec(parts=parts, stack=True), Group(0, 2))
    with pytest.raises(ValueError, match="parts do not concatenate"):
        local_shape(Spec(parts=(parts[0], Part(name="d", shape=(4, 2)))), SINGLE)


def test_map_keeps_the_structure_and_refuses_other_leaves():
    tree = {"a": (spec("a", (2,)), ()), "b": [Params(spec("e", (3,)), (), spec("n", (4,)))]}
    names = map_specs(lambda s: s.parts[0].name, tree)
    assert names == {"a": ("a", ()), "b": [Params("e", (), "n")]}
    assert [is_spec(leaf) for leaf in spec_leaves(tree)] == [True] * 3
    with pytest.raises(ValueError, match=r"holds a int; its leaves must be Spec, absent ones \(\)"):
        spec_leaves({"a": 3})


def test_nbytes_counts_padding_and_own_dtypes():
    tree = (spec("w", (5, 3), axis=0, shards=2), Spec(parts=(Part(name="i", shape=(7,)),), dtype=torch.int64))
    assert nbytes(tree, Group(1, 2), torch.bfloat16) == 3 * 3 * 2 + 7 * 8


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_nbytes_are_the_bytes_of_the_parameters(tp):
    config = tiny_config(vocab_size=199, o_bias=True, qkv_bias=True)
    for rank in range(tp):
        specs = param_specs(config, Layers(), Group(rank, tp))
        params = init_params(specs, Group(rank, tp), dtype=torch.bfloat16)
        held = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(params))
        assert nbytes(specs, Group(rank, tp), torch.bfloat16) == held


# --- filling ---------------------------------------------------------------------------------------------------------


def test_assemble_reads_this_ranks_slices_and_pads_the_last_with_zeros():
    asked = []

    def read(name: str, slices: tuple[slice, ...]) -> Tensor:
        asked.append((name, *((s.start, s.stop) for s in slices)))
        return counting(name, slices)

    parts = (Part(name="a", shape=(20, 3)), Part(name="b", shape=(20, 3), axis=0, shards=8))
    seen = []
    param = assemble({"w": Spec(parts=parts)}, read, Group(6, 8), dtype=torch.float64, progress=seen.append)["w"]
    assert asked == [("a", (0, 20), (0, 3)), ("b", (18, 20), (0, 3))]
    assert param.dtype == torch.float64
    expected = torch.cat([torch.arange(60.0), torch.arange(54.0, 60.0), torch.zeros(3)]).view(23, 3)
    assert torch.equal(param, expected.double())
    assert seen == [23 * 3 * 8]
    empty = assemble({"w": Spec(parts=parts)}, counting, Group(7, 8))["w"]
    assert torch.equal(empty[20:], torch.zeros(3, 3))


def test_assemble_shards_and_pads_the_second_axis():
    part = Part(name="o", shape=(20, 3), axis=1, shards=2)
    param = assemble(Spec(parts=(part,)), counting, Group(1, 2))
    assert torch.equal(param, torch.stack([torch.arange(2.0, 60.0, 3), torch.zeros(20)], 1))


def test_assemble_refuses_a_tensor_of_another_shape():
    with pytest.raises(ValueError, match=r"w was read with shape \[20, 3\]; the model needs \[20, 4\]"):
        assemble(spec("w", (20, 4)), counting)


def test_parameters_work_with_autograd_even_when_made_in_inference_mode():
    with torch.inference_mode():
        params = init_params(param_specs(tiny_config()))
    weight = params.layers[0].mlp.down_proj.weight
    assert not weight.is_inference()
    assert not weight.requires_grad
    weight.requires_grad_()
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


def test_named_gives_views_without_padding_under_checkpoint_names():
    config = tiny_config(vocab_size=199)
    group = Group(1, 2)
    specs = param_specs(config, Layers(), group)
    params = init_params(specs, group, seed=3)
    whole_params = named(init_params(whole(specs), seed=3), whole(specs))
    views = named(params, specs, group)
    assert views.keys() == whole_params.keys()
    assert torch.equal(views["model.embed_tokens.weight"], whole_params["model.embed_tokens.weight"][100:])
    assert torch.equal(params.embed_tokens.weight[99], torch.zeros(64))
    up = whole_params["model.layers.1.mlp.up_proj.weight"][48:]
    assert torch.equal(views["model.layers.1.mlp.up_proj.weight"], up)
    assert torch.equal(params.layers[1].mlp.gate_up_proj.weight[48:], up)
    views["model.layers.1.mlp.up_proj.weight"].zero_()
    assert params.layers[1].mlp.gate_up_proj.weight[48:].count_nonzero() == 0


@pytest.mark.parametrize("tp", [2, 4])
def test_a_seed_gives_the_same_whole_tensors_at_every_tp(tp):
    config = tiny_config(vocab_size=199, qkv_bias=True)
    specs = param_specs(config)
    single = named(init_params(specs, seed=5), specs)
    parts = {part.name: part for s in spec_leaves(param_specs(config, Layers(), Group(0, tp))) for part in s.parts}
    for rank in range(tp):
        group = Group(rank, tp)
        rank_specs = param_specs(config, Layers(), group)
        for name, view in named(init_params(rank_specs, group, seed=5), rank_specs, group).items():
            assert torch.equal(view, single[name][local_slices(parts[name], group)]), name


def test_random_values_have_the_spread_of_their_kind():
    specs = param_specs(tiny_config("Qwen2ForCausalLM"))
    params = init_params(specs, seed=1, std=0.1)
    assert params.embed_tokens.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert torch.equal(params.norm.weight, torch.ones(64))
    assert torch.equal(params.layers[0].self_attn.qkv_proj.bias, torch.zeros(128))
    other = init_params(specs, seed=2, std=0.1)
    assert not torch.equal(params.embed_tokens.weight, other.embed_tokens.weight)
    first, second = (params.layers[i].mlp.down_proj.weight for i in (0, 1))
    assert not torch.equal(first, second)


def naive_normal_values(key: int, start: int, count: int) -> list[float]:
    """normal_values by Python's integers, one number at a time, not yet scaled to the deviation 1."""
    values = []
    for place in range(start, start + count):
        word = (key + place // 4 * 0x9E3779B97F4A7C15) % (1 << 64)
        word ^= word >> 32
        for _ in range(2):
            word = word * 0xD6E8FEB86659FD93 % (1 << 64)
            word ^= word >> 32
        piece = (word >> 16 * (place % 4)) % (1 << 16)
        values.append(NormalDist().inv_cdf(((piece + (1 << 15)) % (1 << 16) + 0.5) / (1 << 16)))
    return values


@pytest.mark.parametrize("key", [0, 0x0123456789ABCDEF, (1 << 64) - 1])
def test_random_values_are_those_of_the_naive_twin_and_of_every_release(key):
    for start in (0, 5, 10**12 + 3):
        expected = naive_normal_values(key, start, 9)
        assert normal_values(key, start, 9).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    drawn = init_part("model.norm.weight", (2, 3), seed=7, std=0.5)
    assert drawn.flatten().tolist() == pytest.approx(
        [-0.5218976, -0.9322984, 0.4209975, 0.4477744, -0.6593998, 0.4545265], rel=1e-6
    )


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 2), (3, 70_000), (65_533, 9), (4 * (1 << 14) - 2, 5), (8, 0)])
def test_any_part_of_the_random_sequence_is_the_same_bits(start, count, monkeypatch):
    whole = normal_values(99, 0, 80_000)
    assert torch.equal(normal_values(99, start, count), whole[start : start + count])
    monkeypatch.setattr("funcllm.specs._CPU_WORDS", 7)
    assert torch.equal(normal_values(99, start, min(count, 500)), whole[start : start + min(count, 500)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_values_in_another_dtype_are_the_fp32_ones_rounded(dtype):
    assert torch.equal(normal_values(3, 0, 5000, 0.02, dtype=dtype), normal_values(3, 0, 5000, 0.02).to(dtype))


def test_the_random_sequence_is_normal_and_its_numbers_do_not_depend_on_each_other():
    x = normal_values(1, 0, 1 << 20, 0.5).double()
    share_n = (x.sort().values[[1 << 17, 1 << 18, 1 << 19, 3 << 18, 7 << 17]] / 0.5).tolist()
    assert share_n == pytest.approx([-1.1503, -0.6745, 0.0, 0.6745, 1.1503], abs=6e-3)
    assert x.mean().item() == pytest.approx(0.0, abs=2.5e-3)
    assert x.std().item() == pytest.approx(0.5, rel=4e-3)
    assert (x**4).mean().item() / 0.5**4 == pytest.approx(3.0, abs=0.03)
    for lag in (1, 2, 3, 4, 1024):
        assert abs((x[lag:] * x[:-lag]).mean().item()) / 0.25 < 5e-3
    neighbour = normal_values(2, 0, 1 << 20, 0.5).double()
    assert abs((x * neighbour).mean().item()) / 0.25 < 5e-3
    spectrum = torch.linalg.svdvals(x[: 1 << 18].view(512, 512).float() / 0.5)
    assert spectrum[0].item() == pytest.approx(2 * 512**0.5, rel=0.03)  # of a random matrix, by Marchenko and Pastur


@pytest.mark.parametrize("rows", [slice(0, 0), slice(1, 4), slice(2, 5), None])
def test_rows_of_a_part_are_rows_of_the_whole(rows):
    def ramp(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator)

    for name, shape, init in (("w", (5, 3), None), ("w", (5, 3), ramp), ("a.bias", (5,), None), ("s", (5, 2, 7), None)):
        whole = init_part(name, shape, seed=4, init=init)
        assert whole.shape == shape
        assert torch.equal(init_part(name, shape, seed=4, init=init, rows=rows), whole[rows or slice(None)])


def test_an_own_init_is_used_for_each_part():
    def ramp(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.arange(6.0).view(shape)

    parts = tuple(Part(name=name, shape=(3, 2), axis=0, shards=3) for name in "ab")
    param = init_params(Spec(parts=parts, init=ramp, stack=True), Group(1, 3))
    assert param.tolist() == [[[2.0, 3.0]], [[2.0, 3.0]]]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fill_writes_whole_tensors_in_place_in_any_order(tp):
    config = tiny_config(vocab_size=199, tie_word_embeddings=True)
    new = named(init_params(param_specs(config), seed=8), param_specs(config))
    for rank in range(tp):
        group = Group(rank, tp)
        specs = param_specs(config, Layers(), group)
        params = init_params(specs, group, seed=7)
        addresses = [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(params)]
        items = [*reversed(new.items()), ("unknown.weight", torch.zeros(1))]
        assert fill(params, specs, items, group) == set(new)
        leaves = torch.utils._pytree.tree_leaves(params)
        assert [leaf.data_ptr() for leaf in leaves] == addresses
        expected = torch.utils._pytree.tree_leaves(init_params(specs, group, seed=8))
        assert all(torch.equal(leaf, other) for leaf, other in zip(leaves, expected))


def test_fill_refuses_another_shape():
    specs = spec("w", (4, 2), axis=0, shards=2)
    param = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"w has shape \[2, 2\]; the model needs \[4, 2\]"):
        fill(param, specs, [("w", torch.ones(2, 2))], Group(0, 2))
    assert param.count_nonzero() == 0


def test_ahead_keeps_the_order_and_passes_errors_on():
    assert list(ahead(lambda x: x * x, range(20), workers=3)) == [x * x for x in range(20)]
    results = ahead(lambda x: 1 // x, [2, 1, 0, 5], workers=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_staged_copies_are_cut_to_the_buffers_and_cast(monkeypatch):
    class Event:
        waits = 0

        def synchronize(self) -> None:
            Event.waits += 1

        def record(self, stream: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    stage = Staging(torch.device("cpu"))
    stage.buffers = [(torch.empty(64, dtype=torch.uint8), Event()) for _ in range(2)]  # type: ignore[misc]
    source = torch.randn(3, 40).T
    for target in (torch.empty(40, 3, dtype=torch.float64), torch.zeros(40, 5, dtype=torch.bfloat16)[:, 1:4]):
        stage.copy(target, source)
        assert torch.equal(target, source.to(target.dtype))
    assert Event.waits == 20 + 4  # 2 rows of 24 bytes at a time, then 10 of 6
    scalar, wide = torch.zeros(()), torch.zeros(1, 100)
    stage.copy(scalar, torch.tensor(3.0))
    stage.copy(wide, torch.ones(1, 100))
    assert (scalar.item(), wide.sum().item(), Event.waits) == (3.0, 100.0, 24)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_parameters_on_a_gpu_are_those_on_the_cpu():
    config = tiny_config(vocab_size=100_003, hidden_size=512)  # an embedding larger than the staging buffers
    for rank in range(2):
        group = Group(rank, 2)
        specs = param_specs(config, Layers(), group)
        here = init_params(specs, group, seed=1, dtype=torch.bfloat16)
        there = init_params(specs, group, seed=1, dtype=torch.bfloat16, device="cuda")
        for ours, theirs in zip(torch.utils._pytree.tree_leaves(here), torch.utils._pytree.tree_leaves(there)):
            assert theirs.is_cuda
            assert torch.equal(ours, theirs.cpu())


# --- modules ---------------------------------------------------------------------------------------------------------


def test_specs_of_a_module_go_into_functional_call():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    specs = specs_of(module, "layers.1.mlp")
    assert specs["0.weight"].parts == (Part(name="layers.1.mlp.0.weight", shape=(6, 4)),)
    assert specs["1.num_batches_tracked"].dtype == torch.int64
    params = init_params(specs, Group(1, 2), dtype=torch.float64)
    assert params["1.num_batches_tracked"].dtype == torch.int64
    x = torch.randn(3, 4)
    y = torch.func.functional_call(module.double().eval(), params, x.double())
    assert torch.equal(y, module(x.double()))
