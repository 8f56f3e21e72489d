"""Pins of blocks by cache hints, and the time of repeated pins."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.pool.saved_blocks import PinnedBlocks
from engine.scheduling.cache_hints import CacheHint
from engine.scheduling.request import Request, SamplingParams, Sequence
from tests.engine.running import Engine
from tests.support.stored import count_keys
from tests.support.watched_store import WatchedStore


def sequence(*hints: CacheHint) -> Sequence:
    request = Request("r", tuple(range(40)), SamplingParams(max_tokens=1), hints=hints)
    return Sequence(request, 4)


def test_blocks_without_a_hint_or_after_it_are_not_pinned() -> None:
    pinned = PinnedBlocks()
    assert list(pinned.split_blocks(sequence(), 0, 10)) == [(0, 10, 0.0)]
    hinted = sequence(CacheHint(10, 600.0), CacheHint(24, 300.0))
    assert list(pinned.split_blocks(hinted, 0, 10)) == [(0, 2, 600.0), (2, 6, 300.0), (6, 10, 0.0)]


def test_a_block_is_pinned_again_after_half_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pinned, hinted = PinnedBlocks(), CacheHint(8, 600.0)
    assert list(pinned.split_blocks(sequence(hinted), 0, 2)) == [(0, 2, 600.0)]
    assert list(pinned.split_blocks(sequence(hinted), 0, 3)) == [(0, 3, 0.0)]
    now += 301
    assert list(pinned.split_blocks(sequence(hinted), 0, 2)) == [(0, 2, 600.0)]


def test_blocks_that_the_pool_did_not_pin_are_pinned_next_time() -> None:
    pinned, hinted = PinnedBlocks(), sequence(CacheHint(12, 600.0))
    list(pinned.split_blocks(hinted, 0, 3))
    pinned.forget_blocks(hinted.hashes()[1:2])
    assert list(pinned.split_blocks(hinted, 0, 3)) == [(0, 1, 0.0), (1, 2, 600.0), (2, 3, 0.0)]


def test_an_instance_pins_blocks_with_a_hint_and_saves_the_others(tiny_checkpoint: Path) -> None:
    store = WatchedStore()
    prompt = list(range(1, 70))  # four full blocks of 16
    with Engine(tiny_checkpoint, store=store) as engine:
        engine.answer(prompt, hints=(CacheHint(40, 600.0),))
        assert sum(count for count, _ in store.kept) == 2
        assert {seconds for _, seconds in store.kept} == {600.0}
        assert count_keys(store) == 4
        engine.answer(prompt, hints=(CacheHint(40, 600.0),))  # now from the own cache, and already pinned
        assert sum(count for count, _ in store.kept) == 2
        engine.answer(prompt, hints=(CacheHint(64, 600.0),))
        assert sum(count for count, _ in store.kept) == 4
