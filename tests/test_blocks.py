"""The block pool: every block in one place, and hits that are what they say."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from funcllm.launch.blocks import TRASH, BlockPool, Hit, default_unit, num_blocks_for

TAG = b"tag"


def _tokens(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def _store(pool: BlockPool, tokens: np.ndarray, tag: bytes = TAG) -> list[int]:
    """Computes a sequence: shares what the pool has of it, registers the rest, and keeps owning its blocks."""
    hit = pool.match(tag, tokens)
    pool.take(hit.blocks)
    blocks = [*hit.blocks, *pool.allocate(num_blocks_for(len(tokens), pool.block_size) - len(hit.blocks))]
    pool.register(hit.chain, tokens, np.array(blocks, np.int32))
    return blocks


def _found(hit: Hit) -> tuple[list[int], int, int, int]:
    return hit.blocks, hit.source, hit.slots, hit.tokens


@pytest.mark.parametrize(("block_size", "unit"), [(1, 1), (4, 4), (16, 16), (24, 24), (32, 16), (128, 16)])
def test_a_unit_is_16_tokens_where_they_divide_the_block(block_size: int, unit: int) -> None:
    assert default_unit(block_size) == unit
    assert BlockPool(4, block_size).unit == unit


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert num_blocks_for(tokens, 4) == blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1, 4), "num_blocks=1"), ((4, 0), "block_size=0"), ((4, 4, 3), "unit=3 must divide block_size=4")],
)
def test_impossible_pools_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockPool(*arguments[:2], unit=arguments[2] if len(arguments) > 2 else None)


def test_the_trash_block_is_never_handed_out() -> None:
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.available == 0
    with pytest.raises(AssertionError, match="1 blocks asked, 0 available"):
        pool.allocate(1)


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(5, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="has no owner"):
        pool.release(blocks)


def test_whole_blocks_are_shared_and_a_part_of_one_is_copied() -> None:
    pool = BlockPool(10, 4, unit=2)
    blocks = _store(pool, _tokens(10))
    assert _found(pool.match(TAG, _tokens(20))) == (blocks[:2], blocks[2], 2, 10)
    assert _found(pool.match(TAG, _tokens(9))) == (blocks[:2], TRASH, 0, 8)
    assert _found(pool.match(TAG, _tokens(7))) == (blocks[:1], blocks[1], 2, 6)


@pytest.mark.parametrize(("length", "tokens"), [(1, 0), (2, 1), (4, 3), (5, 4), (8, 7)])
def test_one_token_is_always_left_to_compute(length: int, tokens: int) -> None:
    pool = BlockPool(10, 4, unit=1)
    _store(pool, _tokens(8))
    hit = pool.match(TAG, _tokens(length))
    assert hit.tokens == tokens
    assert len(hit.blocks) * 4 + hit.slots == tokens


def test_a_hit_needs_the_same_tag_and_every_token_before() -> None:
    pool = BlockPool(20, 4, unit=2)
    _store(pool, _tokens(8))
    other = _tokens(8)
    other[0] = 99
    assert pool.match(b"other", _tokens(8)).tokens == 0
    assert pool.match(TAG, other).tokens == 0
    assert pool.match(TAG, _tokens(8, start=4)).tokens == 0
    assert pool.match(TAG, _tokens(8), read=False).tokens == 0
    assert pool.match(TAG, _tokens(8)).tokens == 7


def test_nothing_is_cached_when_caching_is_off() -> None:
    pool = BlockPool(10, 4, caching=False)
    pool.release(_store(pool, _tokens(8)))
    assert pool.match(TAG, _tokens(8)).tokens == 0
    assert (pool.num_cached, pool.available) == (0, 9)


def test_a_reused_block_is_no_hit_any_more() -> None:
    pool = BlockPool(5, 4)
    pool.release(_store(pool, _tokens(8)))
    assert pool.num_cached == 2
    pool.allocate(4)
    assert pool.match(TAG, _tokens(8)).tokens == 0
    assert pool.num_cached == 0


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(5, 4)
    first = _store(pool, _tokens(12))
    pool.release(first)
    pool.allocate(1 + 2)
    assert pool.match(TAG, _tokens(12)).blocks == first[:1]


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(5, 4)
    old, new = _store(pool, _tokens(8)), _store(pool, _tokens(8, start=50))
    pool.release(old)
    pool.release(new)
    hit = pool.match(TAG, _tokens(9))
    pool.take(hit.blocks)
    pool.release(hit.blocks)
    pool.allocate(2)
    assert pool.match(TAG, _tokens(9)).blocks == old
    assert pool.match(TAG, _tokens(9, start=50)).blocks == []


def test_a_prefix_computed_twice_survives_the_loss_of_either_block() -> None:
    pool = BlockPool(7, 4)
    first, second = pool.match(TAG, _tokens(8)), pool.match(TAG, _tokens(8))
    tables = [pool.allocate(2), pool.allocate(2)]
    for hit, table in zip((first, second), tables):
        pool.register(hit.chain, _tokens(8), np.array(table, np.int32))
    pool.release(tables[0])
    pool.check(Counter(tables[1]))
    pool.allocate(4)
    assert pool.match(TAG, _tokens(9)).blocks == tables[1]


def test_a_continued_part_of_a_block_is_found_without_its_source() -> None:
    """A conversation: the second turn copies half a block, and the third must not need the first one's block."""
    pool = BlockPool(6, 4, unit=2)
    pool.release(_store(pool, _tokens(6)))
    hit = pool.match(TAG, _tokens(12))
    pool.take(hit.blocks)
    blocks = [*hit.blocks, *pool.allocate(2)]
    pool.register(hit.chain, _tokens(12), np.array(blocks, np.int32))
    pool.release(blocks)
    pool.allocate(2)
    assert pool.match(TAG, _tokens(13)).blocks == blocks


def test_a_hit_prefers_a_block_in_use() -> None:
    pool = BlockPool(9, 4)
    hits = [pool.match(TAG, _tokens(4)) for _ in range(3)]
    tables = [pool.allocate(1) for _ in hits]
    for hit, table in zip(hits, tables):
        pool.register(hit.chain, _tokens(4), np.array(table, np.int32))
    pool.release(tables[0])
    pool.release(tables[2])
    assert pool.match(TAG, _tokens(5)).blocks == tables[1]
    assert pool.num_idle(tables[1]) == 0
    assert pool.num_idle([*tables[0], *tables[2]]) == 2


def test_only_what_is_computed_is_registered() -> None:
    pool = BlockPool(9, 4, unit=2)
    hit = pool.match(TAG, _tokens(8))
    table = np.array(pool.allocate(2), np.int32)
    pool.register(hit.chain, _tokens(3), table)
    assert pool.match(TAG, _tokens(8)).tokens == 2
    pool.register(hit.chain, _tokens(8), table)
    assert pool.match(TAG, _tokens(9)).tokens == 8


def test_a_reset_forgets_everything_and_registers_nothing_of_what_is_under_way() -> None:
    pool = BlockPool(9, 4, unit=2)
    hit = pool.match(TAG, _tokens(8))
    table = np.array(pool.allocate(2), np.int32)
    pool.register(hit.chain, _tokens(4), table)
    pool.release(_store(pool, _tokens(4, start=50)))
    pool.reset()
    pool.register(hit.chain, _tokens(8), table)
    pool.check(Counter(table.tolist()))
    assert pool.match(TAG, _tokens(8)).tokens == 0
    assert pool.num_cached == 0
    assert _store(pool, _tokens(4))
    assert pool.match(TAG, _tokens(5)).tokens == 4


def test_forgotten_blocks_are_free_and_end_the_chains_through_them() -> None:
    pool = BlockPool(9, 4, unit=2)
    hit = pool.match(TAG, _tokens(8))
    table = np.array(pool.allocate(2), np.int32)
    pool.register(hit.chain, _tokens(4), table)
    released = _store(pool, _tokens(4, start=50))
    pool.release(released)
    pool.forget([*table.tolist(), *released])
    pool.register(hit.chain, _tokens(8), table)
    pool.check(Counter(table.tolist()))
    assert pool.match(TAG, _tokens(8)).tokens == 0
    assert pool.match(TAG, _tokens(4, start=50)).tokens == 0
    pool.release(table.tolist())
    assert pool.num_cached == 0


def test_a_forgotten_beginning_of_a_block_keeps_its_end_out_of_the_cache() -> None:
    """The first unit has another home, so the chain is whole; the second one's block is still not to be trusted."""
    pool = BlockPool(9, 4, unit=2)
    hits = [pool.match(TAG, _tokens(4)) for _ in range(2)]
    tables = [np.array(pool.allocate(1), np.int32) for _ in hits]
    for hit, table in zip(hits, tables):
        pool.register(hit.chain, _tokens(2), table)
    pool.forget(tables[1].tolist())
    pool.register(hits[1].chain, _tokens(4), tables[1])
    assert _found(pool.match(TAG, _tokens(5))) == ([], int(tables[0][0]), 2, 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free twice"),
        (lambda pool: pool._free.pop(), "a block is lost"),
        (lambda pool: pool._free.append(TRASH), "block 0 is handed out"),
        (lambda pool: pool._cached.update({pool._free[-1]: None}), "two places"),
        (lambda pool: pool._held.pop(next(iter(pool._cached))), "holds nothing"),
        (lambda pool: next(iter(pool._units.values())).homes.clear(), "disagree"),
    ],
)
def test_the_check_finds_what_is_broken(damage: object, message: str) -> None:
    pool = BlockPool(9, 4)
    pool.release(_store(pool, _tokens(8)))
    kept = _store(pool, _tokens(8, start=50))
    pool.check(Counter(kept))
    damage(pool)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        pool.check(Counter(kept))


def test_the_check_compares_owners() -> None:
    pool = BlockPool(9, 4)
    kept = _store(pool, _tokens(8))
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check(Counter(kept[:1]))


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_random_traffic_keeps_every_block_in_one_place(unit: int) -> None:
    rng = random.Random(unit)
    pool = BlockPool(12, 4, unit=unit)
    stems = [[rng.randrange(3) for _ in range(20)] for _ in range(3)]
    alive: list[list[int]] = []
    for _ in range(2000):
        tokens = np.array(rng.choice(stems)[: rng.randint(1, 20)], np.int32)
        if alive and (rng.random() < 0.5 or pool.available < 5):
            pool.release(alive.pop(rng.randrange(len(alive))))
        elif pool.available >= 5:
            alive.append(_store(pool, tokens, rng.choice([b"", TAG])))
        pool.check(Counter(block for blocks in alive for block in blocks))
    assert pool.num_used == len({block for blocks in alive for block in blocks})
