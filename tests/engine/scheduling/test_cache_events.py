"""KV events of the prefix cache: a client that applies them has the hashes of all cached blocks."""

from __future__ import annotations

from pathlib import Path

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.cache_events import CacheEvents
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.scheduling.scheduler import Scheduler
from kvcommon.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from kvstore_backend.groups import Group
from tests.engine.running import Engine
from tests.support.kv_events import apply_events

BLOCK = 4


class Cache:
    """A scheduler with the events of each step."""

    def __init__(self, num_blocks: int = 8, groups: list[Group] | None = None) -> None:
        self.steps: list[list[Event]] = []
        self.blocks = BlockManager(num_blocks, CacheEvents(self.steps.append))
        self._scheduler = Scheduler(
            self.blocks, BLOCK, 4, 64, max_model_len=2 * BLOCK, prefix_caching=True, pool=False, groups=groups or ()
        )

    def compute(self, *prompts: list[int], salt: str = "") -> list[Event]:
        """Compute prompts in one step; return its events."""
        sequences = [Sequence(Request("r", tuple(each), SamplingParams(1), cache_salt=salt), BLOCK) for each in prompts]
        for sequence in sequences:
            self._scheduler.add_sequence(sequence)
        self._scheduler.admit_waiting()
        for chunk in self._scheduler.schedule_step():
            self._scheduler.advance_sequence(chunk)
        for sequence in sequences:
            self._scheduler.finish_sequence(sequence)
        return self.flush()

    def flush(self) -> list[Event]:
        """Return the events since the last call."""
        assert self.blocks.events
        self.steps.clear()
        self.blocks.events.flush()
        return self.steps[0] if self.steps else []


def numbers(prompt: list[int], salt: str = "") -> list[int]:
    """Return the prompt's hashes in the form of the events."""
    sequence = Sequence(Request("r", tuple(prompt), SamplingParams(1), cache_salt=salt), BLOCK)
    return [int.from_bytes(block_hash[-8:], "big") for block_hash in sequence.hashes()]


def test_the_full_blocks_of_a_prompt_are_one_event_with_their_tokens() -> None:
    prompt = list(range(10))
    assert Cache().compute(prompt) == [BlockStored([*numbers(prompt)], None, prompt[:8], BLOCK, medium="GPU")]


def test_an_event_of_blocks_after_a_known_prefix_has_their_parent() -> None:
    cache, prompt = Cache(), list(range(13))
    cache.compute(prompt[:9])
    _, second, third = numbers(prompt)
    assert cache.compute(prompt) == [BlockStored([third], second, prompt[8:12], BLOCK, medium="GPU")]
    assert cache.compute(prompt) == []


def test_blocks_that_two_prompts_compute_in_one_step_are_stored_once() -> None:
    prompt = list(range(9))
    assert Cache().compute(prompt, prompt) == [BlockStored([*numbers(prompt)], None, prompt[:8], BLOCK, medium="GPU")]


def test_a_salt_is_an_extra_key_of_the_first_block() -> None:
    cache, prompt = Cache(), list(range(13))
    [event] = cache.compute(prompt[:9], salt="s")
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.extra_keys) == (numbers(prompt[:9], "s"), [["s"], None])
    [event] = cache.compute(prompt, salt="s")
    assert isinstance(event, BlockStored)
    assert event.extra_keys is None
    [event] = cache.compute(prompt, salt="\ud800")  # valid in JSON, but not in UTF-8
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [["\\ud800"], None, None]


def test_reused_blocks_are_removed_before_others_are_stored() -> None:
    cache, first, second = Cache(num_blocks=3), list(range(9)), list(range(100, 109))
    cache.compute(first)
    removed, stored = cache.compute(second)
    assert removed == BlockRemoved([*reversed(numbers(first))], "GPU")
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == numbers(second)


def test_each_group_of_layers_has_its_own_events() -> None:
    cache, prompt = Cache(num_blocks=8, groups=[Group("full", BLOCK), Group("window", BLOCK, 6)]), list(range(9))
    full, window = cache.compute(prompt)
    assert isinstance(full, BlockStored)
    assert isinstance(window, BlockStored)
    assert (full.group_idx, full.kv_cache_spec_kind) == (0, "full_attention")
    assert (window.group_idx, window.kv_cache_spec_kind) == (1, "sliding_window")
    assert (full.kv_cache_spec_sliding_window, window.kv_cache_spec_sliding_window) == (None, 6)
    assert full.block_hashes == numbers(prompt)
    assert full.token_ids == window.token_ids == prompt[:8]
    assert not set(full.block_hashes) & set(window.block_hashes)
    removed = [event for event in cache.compute(list(range(100, 113))) if isinstance(event, BlockRemoved)]
    pairs = {(event.group_idx, block_hash) for event in removed for block_hash in event.block_hashes}
    assert pairs
    assert pairs <= {(event.group_idx, each) for event in (full, window) for each in event.block_hashes}
    assert {event.group_idx for event in removed} == {0, 1}


def test_there_are_events_for_unpublished_blocks_and_for_a_clear() -> None:
    cache, prompt = Cache(), list(range(9))
    cache.compute(prompt)
    hashes = Sequence(Request("r", tuple(prompt), SamplingParams(1)), BLOCK).hashes()
    cache.blocks.unpublish_blocks(hashes[1:])
    assert cache.flush() == [BlockRemoved([numbers(prompt)[1]], "GPU")]
    cache.blocks.unpublish_all()
    assert cache.flush() == [AllBlocksCleared()]
    assert cache.flush() == []


def test_a_client_that_applies_the_events_of_an_engine_has_the_hashes_of_its_cache(tiny_checkpoint: Path) -> None:
    steps: list[list[Event]] = []
    with Engine(tiny_checkpoint, num_blocks=12, events=CacheEvents(steps.append)) as engine:
        for begin in (0, 40, 0, 80, 120):  # more prompts than the cache can hold
            engine.answer([begin + i % 40 for i in range(70)], 20)
        engine.core.call(lambda: None).result()  # the last step's events are published before the next command
        engine.core.call(lambda: None).result()
        known: set[BlockHash] = set()
        for step in steps:
            apply_events(step, known)
        assert known == {int.from_bytes(each[-8:], "big") for each in engine.blocks.iterate_hashes()}
        assert any(isinstance(event, BlockRemoved) for step in steps for event in step)
        engine.core.clear_prefix_cache()
        engine.answer([1, 2, 3], 1)
        assert [AllBlocksCleared()] in steps
