"""The block pool: who owns which KV block, and which blocks hold the keys and values of which prefix.

Owns reference counts, the free list, and the prefix cache. Receives token ids and tags; hands out block ids.
Invariants: block 0 is the trash block and never handed out; every other block is in exactly one place: free (nothing
cached in it), cached (nobody owns it, least recently used first) or in use (owned `refs` times). `check` proves it.

The prefix cache works in units of tokens, several to a block. The key of a unit is its parent's id and its own token
ids (the tag, for the first unit), so a hit has compared every token id and no hash is trusted. Ids are never used
again: when a unit goes, everything behind it is out of reach. A unit has a home in every block that holds its keys and
values; whoever registers in a block does so from its first unit on, so a home of one unit holds all units before it
in that block, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

TRASH = 0
UNIT = 16  # tokens of a unit, where the block size is a multiple of it

_HOMES_LOOKED_AT = 8


class _Unit:
    """A unit of tokens in the prefix cache, and the blocks in which its keys and values stand."""

    __slots__ = ("homes", "id", "key")

    def __init__(self, number: int, key: tuple[int | bytes, bytes]) -> None:
        self.id = number
        self.key = key
        self.homes: dict[int, None] = {}


@dataclass(slots=True)
class Chain:
    """How far one sequence is registered in the prefix cache. Made by `match`, advanced by `register`."""

    tag: bytes
    epoch: int
    count: int = 0  # units registered
    last: _Unit | None = None


class Hit(NamedTuple):
    """What the cache has of a prompt: whole blocks to share, then the first `slots` of `source` to copy."""

    blocks: list[int]
    source: int  # TRASH: nothing to copy
    slots: int
    tokens: int
    chain: Chain

    def without_copy(self, block_size: int) -> Hit:
        return self._replace(source=TRASH, slots=0, tokens=len(self.blocks) * block_size)


class BlockPool:
    """All KV blocks of an engine.

    num_blocks counts the trash block. unit: tokens of a unit of the prefix cache; it divides the block size.
    """

    def __init__(self, num_blocks: int, block_size: int, *, unit: int | None = None, caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: block 0 is the trash block")
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        self.unit = default_unit(block_size) if unit is None else unit
        if self.unit < 1 or block_size % self.unit:
            raise ValueError(f"unit={self.unit} must divide block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._units_per_block = block_size // self.unit
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, TRASH, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._units: dict[tuple[int | bytes, bytes], _Unit] = {}
        self._held: dict[int, list[_Unit]] = {}
        self._next_id = 0
        self._epoch = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns and that the prefix cache keeps."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.available

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, owned once each. What the prefix cache knew of them is dropped."""
        assert count <= self.available, f"{count} blocks asked, {self.available} available"
        from_free = min(count, len(self._free))
        blocks = self._free[len(self._free) - from_free :]
        del self._free[len(self._free) - from_free :]
        for _ in range(count - from_free):
            block, _ = self._cached.popitem(last=False)
            self._drop(block)
            blocks.append(block)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def take(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these blocks, which are in use or cached."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less. The last blocks of a sequence are the first to be evicted: others may share its beginning."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released and has no owner"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._held:
                self._cached[block] = None
            else:
                self._free.append(block)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody owns: taking them makes that many fewer available."""
        return sum(not self._refs[block] for block in blocks)

    def match(self, tag: bytes, token_ids: Ints, *, read: bool = True) -> Hit:
        """The longest prefix of `token_ids` in the cache under this tag, and the chain to register the rest.

        At least the last token is left to compute. With read=False nothing is looked up.
        """
        units = self._look_up(tag, token_ids) if read and self.caching else []
        tokens = min(len(units) * self.unit, max(len(token_ids) - 1, 0))
        num_whole, slots = divmod(tokens, self.block_size)
        last_units = [units[(i + 1) * self._units_per_block - 1] for i in range(num_whole)]
        return Hit(
            blocks=[self._home(unit) for unit in last_units],
            source=self._home(units[-1]) if slots else TRASH,
            slots=slots,
            tokens=tokens,
            chain=Chain(
                tag=tag,
                epoch=self._epoch,
                count=num_whole * self._units_per_block,
                last=last_units[-1] if last_units else None,
            ),
        )

    def register(self, chain: Chain, token_ids: Ints, table: Ints) -> None:
        """Registers every whole unit of `token_ids` that the chain does not have yet.

        token_ids: the sequence from its start, as far as its keys and values are computed by launched steps;
        table: its blocks. A chain from before a reset, or with a dropped block in it, registers nothing.
        """
        if not self.caching or chain.epoch != self._epoch:
            return
        while (chain.count + 1) * self.unit <= len(token_ids):
            start = chain.count * self.unit
            tokens = token_ids[start : start + self.unit].tobytes()
            if not self._register_unit(chain, int(table[start // self.block_size]), tokens):
                return

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops what the prefix cache knows of these blocks, because their contents cannot be trusted."""
        for block in blocks:
            self._drop(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def reset(self) -> None:
        """Empties the prefix cache. Sequences under way register nothing of what they have computed."""
        self._epoch += 1
        self._units.clear()
        self._held.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self, owners: Mapping[int, int]) -> None:
        """Raises AssertionError unless every block is in one place and owned exactly as `owners` says."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._refs) if count}
        assert len(free) == len(self._free), f"free twice: {sorted(self._free)}"
        assert free | cached | used == set(range(1, self.num_blocks)), "a block is lost, or block 0 is handed out"
        assert len(free) + len(cached) + len(used) == self.num_blocks - 1, "a block is in two places"
        refs = {block: self._refs[block] for block in used}
        assert refs == dict(owners), f"reference counts {refs} are not the owners {dict(owners)}"
        assert not free & self._held.keys(), "a free block holds registered units"
        assert cached <= self._held.keys(), "a cached block holds nothing"
        self._check_units()

    def _check_units(self) -> None:
        homes = {(unit.id, block) for unit in self._units.values() for block in unit.homes}
        held = {(unit.id, block) for block, units in self._held.items() for unit in units}
        assert homes == held, "units and blocks disagree on who holds what"
        for block, units in self._held.items():
            assert 0 < len(units) <= self._units_per_block, f"block {block} holds {len(units)} units"
            for parent, unit in pairwise(units):
                assert unit.key[0] == parent.id, f"units of block {block} do not follow each other"
            for unit in units:
                assert self._units[unit.key] is unit, "a held unit is not the registered one"

    def _look_up(self, tag: bytes, token_ids: Ints) -> list[_Unit]:
        tokens, width = token_ids.tobytes(), self.unit * token_ids.itemsize
        parent: int | bytes = tag
        units = []
        for start in range(0, len(tokens) - width + 1, width):
            unit = self._units.get((parent, tokens[start : start + width]))
            if unit is None:
                break
            units.append(unit)
            parent = unit.id
        return units

    def _home(self, unit: _Unit) -> int:
        """A block that holds the unit, one in use where there is one at hand: sharing it costs nothing."""
        for block in islice(unit.homes, _HOMES_LOOKED_AT):
            if self._refs[block]:
                return block
        return next(iter(unit.homes))

    def _register_unit(self, chain: Chain, block: int, tokens: bytes) -> bool:
        held = self._held.get(block, [])
        is_broken = len(held) != chain.count % self._units_per_block
        if is_broken or (chain.last is not None and not chain.last.homes):
            return False
        key = (chain.tag if chain.last is None else chain.last.id, tokens)
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = _Unit(self._next_id, key)
            self._next_id += 1
        unit.homes[block] = None
        held.append(unit)
        self._held[block] = held
        chain.last = unit
        chain.count += 1
        return True

    def _drop(self, block: int) -> None:
        for unit in self._held.pop(block, ()):
            del unit.homes[block]
            if not unit.homes:
                del self._units[unit.key]


def default_unit(block_size: int) -> int:
    """Tokens of a unit of the prefix cache: UNIT, or a whole block where the block is no multiple of it."""
    return block_size if block_size % UNIT else UNIT


def num_blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
