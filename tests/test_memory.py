from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcllm.group import SINGLE, Group, run_threads
from funcllm.launch import memory
from funcllm.launch.memory import (
    MemoryUse,
    blocks_of,
    cache_bytes,
    device_memory,
    fitting_kv_blocks,
    gib,
    measure_kv_blocks,
    num_kv_blocks,
    useful_kv_blocks,
)

GIB = 1 << 30
H200 = MemoryUse(total=140 * GIB, free=122 * GIB, weights=16 * GIB, peak_activation=2 * GIB, graphs=GIB, state=GIB)


def init_cache(
    num_blocks: int, block_size: int, num_rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], ...]:
    shape = (num_blocks, block_size, 2, 16)
    paged = tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
    return (paged, paged, (torch.zeros(num_rows, 5, device=device, dtype=torch.float32),))


def test_bytes_of_any_cache_are_split_into_blocks_and_the_rest() -> None:
    per_block, fixed = cache_bytes(init_cache, 4, 7, torch.bfloat16)
    assert per_block == 2 * 2 * 4 * 2 * 16 * 2  # layers, keys and values, slots, heads, head dim, bytes
    assert fixed == 7 * 5 * 4


@pytest.mark.parametrize(
    ("fraction", "size_by", "use", "expected"),
    [
        (0.9, "total", H200, 126 - 16 - 4),  # within 0.9 of the device
        (0.5, "total", H200, 70 - 16 - 4),
        (1.0, "total", H200, 122 - 4),  # what is free bounds it
        (0.9, "total", MemoryUse(total=140 * GIB, free=30 * GIB, weights=16 * GIB), 30),  # a busy neighbour
        (0.9, "free", MemoryUse(total=140 * GIB, free=30 * GIB, weights=16 * GIB, graphs=2 * GIB), 25),
        (0.9, "total", MemoryUse(total=140 * GIB, free=3 * GIB, weights=16 * GIB, graphs=4 * GIB), 0),
        (0.1, "total", H200, 0),
    ],
)
def test_what_fits_is_bounded_by_the_fraction_and_by_what_is_free(
    fraction: float, size_by: str, use: MemoryUse, expected: int
) -> None:
    assert fitting_kv_blocks(use, GIB, fraction, size_by) == expected  # type: ignore[arg-type]


@given(
    st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 1 << 38),
    st.floats(0.01, 1), st.integers(1, 1 << 30), st.sampled_from(["total", "free"]),
)  # fmt: skip
def test_blocks_never_take_more_than_is_free_nor_are_negative(
    total: int, free: int, weights: int, peak: int, fraction: float, size: int, size_by: str
) -> None:
    use = MemoryUse(total=total, free=min(free, total), weights=weights, peak_activation=peak)
    blocks = fitting_kv_blocks(use, size, fraction, size_by)  # type: ignore[arg-type]
    assert blocks >= 0
    assert blocks == 0 or blocks * size + peak <= use.free


def test_the_pool_is_capped_at_what_can_be_used() -> None:
    cap = useful_kv_blocks(8, 1000, 16)
    assert cap == 8 * 63 + 126 + 1
    assert useful_kv_blocks(1, 16, 16, allowance=0) == 2
    assert num_kv_blocks(H200, 1024, group=SINGLE, cap=cap) == cap
    assert [blocks_of(length, 4) for length in (1, 4, 5)] == [1, 1, 2]


def test_an_explicit_number_of_blocks_is_taken_as_it_is() -> None:
    assert num_kv_blocks(H200, GIB, group=SINGLE, cap=10, kv_blocks=118) == 118
    with pytest.raises(ValueError, match=r"kv_blocks=119 \(119 GiB\), but 118 of 1 GiB fit .* lower kv_blocks"):
        num_kv_blocks(H200, GIB, group=SINGLE, cap=10, kv_blocks=119)
    with pytest.raises(ValueError, match="kv_blocks=1 is below 2"):
        num_kv_blocks(H200, GIB, group=SINGLE, cap=10, kv_blocks=1)


def test_too_little_memory_is_told_with_all_numbers_and_the_way_out() -> None:
    use = MemoryUse(total=24 * GIB, free=2 * GIB, weights=8 * GIB, peak_activation=GIB, graphs=GIB // 2)
    with pytest.raises(ValueError, match="least that works is 64 KV blocks") as error:
        num_kv_blocks(use, 16 << 20, group=SINGLE, cap=1000, minimum=64)
    message = str(error.value)
    for part in ("total 24 GiB", "free 2 GiB", "weights 8 GiB", "peak activation 1 GiB", "graphs 512 MiB"):
        assert part in message
    assert "but 32 of 16 MiB fit on the device" in message
    assert "other processes and the context hold 14 GiB" in message
    assert "raise the memory fraction, lower max_model_len" in message


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5])
def test_impossible_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        num_kv_blocks(H200, GIB, group=SINGLE, cap=10, fraction=fraction)


def with_free(rank: int) -> MemoryUse:
    return MemoryUse(total=16 * GIB, free=(10 - 4 * (rank == 1)) * GIB, weights=GIB)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_take_what_fits_on_the_tightest(size: int) -> None:
    blocks = run_threads(lambda group: num_kv_blocks(with_free(group.rank), GIB, group=group, cap=100), size)
    assert blocks == [6] * size


def test_all_ranks_raise_the_numbers_of_the_tightest() -> None:
    def message(group: Group) -> str:
        with pytest.raises(ValueError, match="rank 1 of 4") as error:
            num_kv_blocks(with_free(group.rank), GIB, group=group, cap=100, minimum=8)
        return str(error.value)

    messages = run_threads(message, 4)
    assert len(set(messages)) == 1
    assert "free 6 GiB" in messages[0]


def test_a_hosts_memory_is_that_of_its_container(tmp_path: Path) -> None:
    root = tmp_path
    (root / "proc").mkdir()
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    assert memory._host_memory(root) == (8 * GIB, 6 * GIB)
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert memory._host_memory(root) == (8 * GIB, 6 * GIB)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{4 * GIB}\n")
    (root / "sys/fs/cgroup/memory.current").write_text(f"{GIB}\n")
    assert memory._host_memory(root) == (4 * GIB, 3 * GIB)


def test_ranks_on_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_memory", lambda: (8 * GIB, 6 * GIB))
    assert device_memory(torch.device("cpu"), sharing=2) == (4 * GIB, 3 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 10))
    assert device_memory(torch.device("cuda", 0)) == (10, 5)


MEASURED = {
    "peak_bytes": 2 * GIB,
    "graph_bytes": GIB,
    "bytes_per_block": GIB,
    "fraction": 0.9,
    "max_num_seqs": 1000,
    "max_model_len": 100,
    "block_size": 10,
}


def test_a_gpu_is_measured_with_everything_allocated_that_is_not_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 12 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = torch.device("cuda", 0)
    assert measure_kv_blocks(device=device, weight_bytes=10 * GIB, **MEASURED) == 57  # all that is free
    lower = {**MEASURED, "fraction": 0.5}
    assert measure_kv_blocks(device=device, weight_bytes=10 * GIB, **lower) == 50 - 12 - 3
    assert measure_kv_blocks(device=device, weight_bytes=20 * GIB, **lower) == 50 - 20 - 3
    assert measure_kv_blocks(device=device, weight_bytes=20 * GIB, kv_blocks=40, **lower) == 40


def test_a_cpus_pool_takes_a_part_of_what_is_free_and_no_more_than_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_memory", lambda: (400 * GIB, 100 * GIB))
    measured = {**MEASURED, "peak_bytes": 0, "graph_bytes": 0}
    cpu = {"device": torch.device("cpu"), "weight_bytes": 10 * GIB}
    assert measure_kv_blocks(**cpu, **measured) == 30
    assert run_threads(lambda group: measure_kv_blocks(**cpu, group=group, **measured), 2) == [15, 15]
    assert measure_kv_blocks(**cpu, **{**measured, "max_num_seqs": 1}) == 10 + 3 + 1


def test_this_machine_has_memory() -> None:
    total, free = device_memory(torch.device("cpu"))
    assert 0 < free <= total


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (GIB, "1 GiB"), (140 * GIB, "140 GiB")])
def test_sizes_are_written_in_fitting_units(size: int, text: str) -> None:
    assert gib(size) == text
