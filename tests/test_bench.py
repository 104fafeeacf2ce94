from __future__ import annotations

import json
import math
import random

import pytest
import torch
from click.testing import CliRunner

from funcllm.config import qwen3_config
from funcllm.launch import bench
from funcllm.launch.bench import Costs, KernelRow, Limits, Requests, Result, Workload
from funcllm.launch.cli import main
from funcllm.record import Layers

LIMITS = Limits(bandwidth=1e3, flops=1e6, source="given")
COSTS = Costs(weight_bytes=1000, kv_bytes=10, linear_flops=100, head_flops=50, pair_flops=2)


def close(value, expected):
    return math.isclose(value, expected, rel_tol=1e-9)


# --- workloads -------------------------------------------------------------------------------------------------------


def test_no_job_finds_the_prompts_of_another_in_the_prefix_cache() -> None:
    names = ["nano", "b1", "dec64", "dec256", "pre4096", "long4096", "steady64"]
    seeds = [bench.first_seed(bench.workload(name), seed) + i for name in names for seed in (0, 1) for i in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert bench.first_seed(bench.workload("nano"), 0) == 0


def test_requests_are_drawn_in_a_fixed_order():
    drawn = bench.requests(3, (2, 5), (7, 9), seed=4)
    rng = random.Random(4)
    expected = []
    for _ in range(3):
        length = rng.randint(2, 5)
        expected.append([rng.randint(0, 10_000) for _ in range(length)])
    assert drawn.prompts == expected
    assert drawn.outputs == [rng.randint(7, 9) for _ in range(3)]


def test_requests_stay_within_the_vocabulary():
    drawn = bench.requests(20, (50, 50), (1, 1), seed=0, max_id=9)
    assert {i for prompt in drawn.prompts for i in prompt} == set(range(10))


@pytest.mark.parametrize(
    ("name", "count", "prompts", "outputs", "steps", "temperature", "unit"),
    [
        ("nano", 256, (100, 1024), (100, 1024), 0, 0.6, "s"),
        ("b1", 1, (128, 128), (513, 513), 512, 0.0, "ms"),
        ("dec64", 64, (512, 512), (257, 257), 256, 0.6, "ms"),
        ("pre4096", 1, (4096, 4096), (1, 1), 0, 0.0, "ms"),
        ("long32768", 1, (32768, 32768), (129, 129), 128, 0.0, "ms"),
        ("steady64", 64, (512, 512), (256, 256), 0, 0.6, "ms"),
    ],
)
def test_workloads(name, count, prompts, outputs, steps, temperature, unit):
    work = bench.workload(name)
    assert (work.count, work.prompt_range, work.output_range) == (count, prompts, outputs)
    assert (work.steps, work.temperature, work.unit) == (steps, temperature, unit)


def test_jobs_are_checked():
    assert bench.parse_jobs(["nano", " dec8", "nano", "start"]) == ["nano", "dec8", "start"]
    for wrong in ("dec", "dec0", "b12", "", "nano2"):
        with pytest.raises(ValueError, match="there is no job"):
            bench.parse_jobs([wrong])


# --- floors ----------------------------------------------------------------------------------------------------------


def test_costs_of_the_real_shapes():
    costs = bench.costs_of(qwen3_config("8b"), Layers(), 1, torch.bfloat16)
    layer = (4096 + 2 * 1024) * 4096 + 4096 * 4096 + 3 * 12288 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert costs.linear_flops == 2 * 36 * layer
    assert costs.head_flops == 2 * 151936 * 4096
    assert costs.weight_bytes == 2 * (36 * layer + 151936 * 4096 + norms)
    assert costs.kv_bytes == 36 * 2 * 8 * 128 * 2
    assert costs.pair_flops == 36 * 4 * 32 * 128


def test_a_tied_embedding_is_read_as_the_head():
    costs = bench.costs_of(qwen3_config("0.6b"), Layers(), 1, torch.bfloat16)
    assert costs.weight_bytes == 2 * 596_049_920


def test_ranks_share_the_costs():
    one, two = (bench.costs_of(qwen3_config("8b"), Layers(), tp, torch.bfloat16) for tp in (1, 2))
    assert two.linear_flops * 2 == one.linear_flops
    assert two.kv_bytes * 2 == one.kv_bytes
    assert two.pair_flops * 2 == one.pair_flops
    assert one.weight_bytes / 2 < two.weight_bytes < one.weight_bytes * 0.501


def test_decode_is_bound_by_bytes_or_by_flops():
    # two steps of one row behind 3 tokens read 4 and then 5 keys
    assert close(bench.decode_floor([3], [2], COSTS, LIMITS), (2 * 1000 + 9 * 10) / 1e3)
    many = bench.decode_floor([3] * 10_000, [2] * 10_000, COSTS, Limits(bandwidth=1e9, flops=1e6, source=""))
    assert close(many, 10_000 * (2 * 150 + 9 * 2) / 1e6)


def test_rows_that_end_early_still_need_the_longest_row_s_steps():
    assert close(bench.decode_floor([0, 0], [1, 3], COSTS, LIMITS), (3 * 1000 + (1 + 1 + 2 + 3) * 10) / 1e3)


def test_prefill_is_causal():
    flops = 4 * 100 + (1 + 2 + 3 + 4) * 2 + 50
    assert close(bench.prefill_floor([4], COSTS, Limits(bandwidth=1e9, flops=1.0, source="")), flops)
    assert close(bench.prefill_floor([4], COSTS, LIMITS), (1000 + 40) / 1e3)


def test_floors_come_in_the_unit_of_the_job():
    step = Workload(name="x", prompt_range=(3, 3), output_range=(3, 3), steps=2)
    drawn = Requests([[0] * 3], [3])
    assert close(bench.floor_of(step, drawn, COSTS, LIMITS), 1e3 * 2.09 / 2)
    whole = Workload(name="x", prompt_range=(3, 3), output_range=(3, 3), in_seconds=True)
    assert close(bench.floor_of(whole, drawn, COSTS, LIMITS), 1.03 + 2.09)
    first = Workload(name="x", prompt_range=(3, 3), output_range=(1, 1))
    assert close(bench.floor_of(first, Requests([[0] * 3], [1]), COSTS, LIMITS), 1030)


def test_given_limits_are_not_measured():
    limits = bench.measure_limits(torch.device("cpu"), torch.float32, bandwidth=4.26, flops=810)
    assert limits == Limits(bandwidth=4.26e12, flops=8.1e14, source="given")


def test_measured_limits_are_of_this_machine():
    limits = bench.measure_limits(torch.device("cpu"), torch.float32, flops=1)
    assert limits.source == "measured: bandwidth by a copy"
    assert 1e8 < limits.bandwidth < 1e13


# --- figures ---------------------------------------------------------------------------------------------------------


class FakeEngine:
    """Takes a millisecond a token of the longest output, and ten a call."""

    def __init__(self, monkeypatch, missing=0):
        self.config = qwen3_config("tiny")
        self.now, self.missing, self.calls = 100.0, missing, []
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.now)

    def generate(self, prompts, sampling):
        self.calls.append((prompts, sampling))
        self.now += 0.010 + 0.001 * max(one.max_tokens for one in sampling)
        return [type("Output", (), {"token_ids": [0] * (s.max_tokens - self.missing), "error": None}) for s in sampling]


def test_a_step_is_the_difference_of_two_runs(monkeypatch):
    engine = FakeEngine(monkeypatch)
    result = bench.run_work(engine, bench.workload("dec2"), COSTS, LIMITS)
    assert close(result.first, 1.0)
    assert close(result.second, 1.0)
    assert [len(prompts) for prompts, _ in engine.calls] == [2] * 4
    assert [sampling[0].max_tokens for _, sampling in engine.calls] == [257, 1, 257, 1]
    assert all(one.ignore_eos and not one.detokenize and one.temperature == 0.6 for _, s in engine.calls for one in s)
    assert all(one.top_k == 0 and one.top_p == 1.0 for _, s in engine.calls for one in s)
    firsts = [tuple(prompt[:8]) for prompts, _ in engine.calls for prompt in prompts]
    assert len(set(firsts)) == len(firsts)  # no run finds another's prefixes


def test_the_first_token_is_the_whole_time(monkeypatch):
    result = bench.run_work(FakeEngine(monkeypatch), bench.workload("pre16"), COSTS, LIMITS)
    assert close(result.second, 11.0)
    assert result.unit == "ms"


def test_a_throughput_counts_the_outputs(monkeypatch):
    work = Workload(name="x", count=3, prompt_range=(2, 2), output_range=(4, 4), in_seconds=True)
    result = bench.run_work(FakeEngine(monkeypatch), work, COSTS, LIMITS)
    assert close(result.second, 0.014)
    assert result.details == {"tokens_per_second": round(12 / 0.014, 1)}


class SteadyEngine(FakeEngine):
    """A millisecond a step, and ten more for every prompt in it; requests run in the order of their ids."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.left, self.new, self.running, self.aborted = {}, 0, [], []

    def submit(self, prompt, sampling):
        self.left[len(self.left)] = sampling.max_tokens
        self.new += 1
        return len(self.left) - 1

    def step(self):
        self.now += 0.001 + 0.010 * self.new
        self.new = 0
        alive = [i for i, n in self.left.items() if n > 0]
        self.running.append(len(alive))
        for i in alive:
            self.left[i] -= 1
        return [i for i in alive if self.left[i] == 0]

    def output(self, request_id):
        return type("Output", (), {"error": None})

    def abort(self, request_id):
        self.aborted.append(request_id)
        self.left[request_id] = 0


def test_arrivals_are_steady(monkeypatch):
    engine = SteadyEngine(monkeypatch)
    result = bench.run_work(engine, bench.workload("steady4"), COSTS, LIMITS)
    # of 4 sequences with 256 tokens each one ends every 64 steps, so 512 steps take 8 prompts in
    assert close(result.second, 1.0 + 8 * 10.0 / 512)
    assert result.details == {"tokens_per_second": round(8 * 256 / (0.512 + 0.080), 1), "longest_gap_ms": 11.0}
    assert set(engine.running) == {4}
    assert len(engine.aborted) == 2 * 4
    assert [engine.left[i] for i in engine.aborted] == [0] * 8


def test_the_floor_of_steady_arrivals_counts_prompts_by_their_flops():
    work = Workload(name="x", count=2, prompt_range=(3, 3), output_range=(2, 2), is_steady=True)
    decode = (2 * 1000 + 2 * 9 * 10) / 1e3
    prompts = 2 * (3 * 100 + 6 * 2 + 50) / 1e6
    assert close(bench.floor_of(work, Requests([[0] * 3] * 2, []), COSTS, LIMITS), 1e3 * (decode + prompts) / 2)


def test_a_request_that_is_cut_short_is_no_figure(monkeypatch):
    with pytest.raises(RuntimeError, match="gave 0 of 1 tokens: cut short"):
        bench.run_work(FakeEngine(monkeypatch, missing=1), bench.workload("pre16"), COSTS, LIMITS)


def test_the_table_shows_the_share_of_the_limit():
    rows = [
        Result(job="b1", unit="ms", first=3.0, second=2.0, floor=0.5),
        Result(job="start", unit="s", first=9.0, second=5.0, details={"imports": 1.0}),
    ]
    first, second = bench.result_table(rows).splitlines()[1:]
    assert first.split() == ["b1", "3.000", "2.000", "ms", "0.500", "25.0%"]
    assert second.split() == ["start", "9.000", "5.000", "s", "-", "-", "imports", "1"]


def test_the_kernel_table_knows_the_bytes_of_attention_and_matmuls():
    rows = [
        KernelRow("_decode_kernel", 2, 30.0),
        KernelRow("nvjet_tst_64x8", 5, 60.0),
        KernelRow("triton_poi_fused_mul_silu", 4, 10.0),
    ]
    limits = Limits(bandwidth=1e12, flops=1e15, source="")
    table = bench.kernel_table(rows, weight_bytes=30_000_000, kv_bytes=15_000_000, limits=limits)
    kernels, kinds = (block.splitlines()[1:] for block in table.split("\n\n"))
    assert kernels[0].split() == ["2", "30.0", "30.0%", "_decode_kernel"]
    assert kinds[0].split() == ["5", "60.0", "60.0%", "0.030", "50.0%", "matmul"]
    assert kinds[1].split() == ["2", "30.0", "30.0%", "0.015", "50.0%", "attention"]
    assert kinds[2].split() == ["4", "10.0", "10.0%", "-", "-", "other"]
    assert kinds[3].split() == ["11", "100.0", "all"]


# --- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_runs_every_kind_of_job(tmp_path, byte_folder):
    lines, profile = tmp_path / "figures.jsonl", tmp_path / "profile"
    flags = ["--jobs", "dec2,pre32,long40,host,start", "--device", "cpu", "--bandwidth", "0.01", "--flops", "0.05"]
    command = ["bench", "--model", str(byte_folder), "--max-model-len", "512", *flags, "--json", str(lines)]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2  # dec2 needs 769 tokens
    command[command.index("dec2,pre32,long40,host,start")] = "long40,pre32,host,start"
    result = CliRunner().invoke(main, [*command, "--profile", str(profile)])
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["job"] for row in rows] == ["long40", "pre32", "host1", "host256", "start"]
    assert all(row["first"] > 0 and row["second"] > 0 for row in rows)
    assert all(close(row["share_of_limit"], row["floor"] / row["second"]) for row in rows[:2])
    assert rows[0]["buckets"] == [1]
    assert rows[0]["model"] == str(byte_folder)
    parts = "interpreter and imports,arguments,configuration,look at the device,ranks,context,kernels,load,allocate,"
    parts += "warm up,size the cache,capture,scheduler,first step"
    assert sum(rows[-1][part] for part in parts.split(",")) == pytest.approx(rows[-1]["second"], abs=1e-6)
    assert min(rows[-1][part] for part in parts.split(",")) >= 0
    assert rows[-1]["prefill at the first token"] == "cpu"
    table = (profile / "kernels.txt").read_text()
    assert "funcllm::attend" in table
    assert float(table.split("last one's end: ")[1].split()[0]) > 0
    assert json.loads((profile / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_bench_takes_random_weights_in_memory():
    result = CliRunner().invoke(main, ["bench", "--size", "tiny", "--jobs", "pre32", "--device", "cpu"])
    assert result.exit_code == 0, result.stderr
    assert "model: tiny" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("pre32 ")
