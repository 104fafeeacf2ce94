"""The shapes of steps."""

from __future__ import annotations

from itertools import pairwise

import pytest

from funcllm.launch.buckets import Buckets, make_buckets


@pytest.mark.parametrize(
    ("max_num_seqs", "decode"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_decode_buckets_reach_exactly_the_largest_batch(max_num_seqs: int, decode: tuple[int, ...]) -> None:
    assert make_buckets(max_num_seqs).decode == decode


def test_steps_grow_with_the_batch() -> None:
    decode = make_buckets(512).decode
    assert [b - a for a, b in pairwise(decode) if 64 <= a < 256] == [16] * 12
    assert [b - a for a, b in pairwise(decode) if a >= 256] == [32] * 8
    assert decode[-1] == 512


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 64, 100, 300])
def test_every_batch_fits_the_smallest_bucket_that_holds_it(max_num_seqs: int) -> None:
    buckets = make_buckets(max_num_seqs)
    for rows in range(1, max_num_seqs + 1):
        bucket = buckets.decode_bucket(rows)
        assert bucket == min(size for size in buckets.decode if size >= rows)
        assert buckets.decode_bucket(rows, chunk_tokens=9) == max(bucket, 2)


def test_a_mixed_step_has_two_decode_rows_at_least() -> None:
    buckets = make_buckets(8)
    assert [buckets.decode_bucket(rows, chunk_tokens=9) for rows in (0, 1, 2, 3)] == [2, 2, 2, 4]
    assert buckets.decode_bucket(1) == 1


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="9 decode rows do not fit the largest bucket, 8"):
        make_buckets(8).decode_bucket(9)


@pytest.mark.parametrize(("chunks", "bucket"), [(0, 0), (1, 2), (2, 2), (3, 4), (5, 8), (64, 64), (65, 128)])
def test_chunk_buckets_are_powers_of_two(chunks: int, bucket: int) -> None:
    assert make_buckets(8).chunk_bucket(chunks) == bucket


@pytest.mark.parametrize(("longest", "span"), [(0, 0), (1, 16), (16, 16), (17, 32), (1000, 1024), (1024, 1024)])
def test_spans_are_powers_of_two_from_16(longest: int, span: int) -> None:
    assert make_buckets(8).span(longest, 2048) == span


@pytest.mark.parametrize(
    ("decode_bucket", "chunk_tokens", "tokens"),
    [
        (8, 0, 8),
        (2, 1, 16),
        (2, 14, 16),
        (2, 15, 32),
        (2, 1022, 1024),
        (2, 1023, 1088),
        (2, 4096, 4160),
        (2, 8192, 8448),
    ],
)
def test_token_buckets(decode_bucket: int, chunk_tokens: int, tokens: int) -> None:
    assert make_buckets(8).token_bucket(decode_bucket, chunk_tokens) == tokens


@pytest.mark.parametrize("budget", [1, 5, 8, 16, 100, 2048, 8192])
@pytest.mark.parametrize("max_num_seqs", [1, 5, 64, 100])
@pytest.mark.parametrize("captured_tokens", [0, 16, 1000, 8192])
def test_no_step_within_the_budget_is_larger_than_the_largest(
    budget: int, max_num_seqs: int, captured_tokens: int
) -> None:
    buckets = make_buckets(max_num_seqs, captured_tokens=min(captured_tokens, budget))
    sizes = [buckets.decode[-1]]
    for rows in range(min(max_num_seqs, budget - 1) + 1):
        for chunk_tokens in {1, budget - rows}:
            bucket = buckets.decode_bucket(rows, chunk_tokens=chunk_tokens)
            sizes.append(buckets.token_bucket(bucket, chunk_tokens))
    assert max(sizes) == buckets.largest_tokens(budget)


def test_impossible_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        make_buckets(0)


def test_buckets_are_a_static_fact() -> None:
    assert hash(make_buckets(8)) == hash(Buckets(decode=(1, 2, 4, 8)))


def test_mixed_steps_that_may_be_captured_have_few_sizes() -> None:
    buckets = make_buckets(300, captured_tokens=2000)
    assert buckets.captured_tokens == 2048
    tokens = sorted({buckets.token_bucket(3, chunk) - 3 for chunk in range(1, 2049)})
    assert tokens[:10] == [16, 32, 48, 64, 80, 96, 112, 128, 144, 160]
    assert tokens[-10:] == [960, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048]
    assert sorted({buckets.chunk_bucket(chunks) for chunks in range(301)}) == [0, 2, 8, 32, 128, 512]
    assert buckets.span(3, 2048) == buckets.span(2000, 2048) == 2048
    assert [buckets.span(0, 16), buckets.span(3, 48), buckets.span(3, 2112)] == [0, 64, 16]


def test_decode_rows_beside_many_prompt_tokens_have_fewer_sizes_still() -> None:
    buckets = make_buckets(300, captured_tokens=8192)

    def rows(chunk_tokens: int) -> list[int]:
        return sorted({buckets.decode_bucket(n, chunk_tokens=chunk_tokens) for n in range(301)})

    assert rows(8192) == [2, 64, 256, 300]
    assert rows(100) == [2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300]
    assert buckets.decode_bucket(65, chunk_tokens=8192) == 256
    assert buckets.decode_bucket(65, chunk_tokens=2048) == 96


def test_a_full_chunk_that_may_be_captured_is_not_padded() -> None:
    buckets = make_buckets(64, captured_tokens=8192)
    assert [buckets.token_bucket(2, tokens) for tokens in (512, 4096, 8192)] == [514, 4098, 8194]
    assert buckets.token_bucket(64, 8183) == 8256


@pytest.mark.parametrize("captured_tokens", [0, 16, 700, 4096])
def test_a_mixed_step_fits_its_sizes(captured_tokens: int) -> None:
    buckets, usual = make_buckets(300, captured_tokens=captured_tokens), make_buckets(300)
    for num_decode in range(0, 301, 7):
        assert buckets.decode_bucket(num_decode) == usual.decode_bucket(num_decode)
        for chunk_tokens in (1, 17, 130, 1000, 4000, 9000):
            rows = buckets.decode_bucket(num_decode, chunk_tokens=chunk_tokens)
            padding = (num_decode + chunk_tokens) // 16
            assert num_decode <= rows <= max(2 * num_decode, num_decode + padding, 2)
            tokens = buckets.token_bucket(rows, chunk_tokens)
            assert tokens >= rows + chunk_tokens
            assert buckets.span(chunk_tokens, tokens - rows) >= chunk_tokens
            if chunk_tokens > buckets.captured_tokens:
                assert rows == usual.decode_bucket(num_decode, chunk_tokens=chunk_tokens)
                assert tokens == usual.token_bucket(rows, chunk_tokens)
                assert tokens % 16 == 0
            else:
                assert (tokens - rows) % 16 == 0
                assert tokens - rows <= max(1.125 * chunk_tokens, chunk_tokens + 15)
