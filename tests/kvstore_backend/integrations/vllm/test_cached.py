"""vLLM's cached blocks that were saved to the pool: those that are still cached, and the order of their reuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backend.backend import Status
from kvstore_backend.integrations.vllm import cached as module
from kvstore_backend.integrations.vllm.cached import CachedBlocks
from tests.support.waiting import wait_until


class Scheduler:
    """vLLM's blocks and the calls for them. The test runs the posted functions."""

    def __init__(self, *num_present: int) -> None:
        self.blocks = [SimpleNamespace(block_hash=f"h{number}") for number in range(10)]
        self.posts: list[Callable[[], None]] = []
        self.saved: list[tuple[list[bytes], list[int]]] = []
        self.touched: list[list[int]] = []
        pools: list[Any] = [
            SimpleNamespace(
                exists=lambda names, for_all, most=most: ([Status.OK] * most + [Status.ABSENT] * 9)[: len(names)]
            )
            for most in num_present or (9,)
        ]
        self.cached = CachedBlocks(
            pools,
            self.blocks.__getitem__,
            self.posts.append,
            self._save,
            lambda blocks: self.touched.append(list(blocks)),
        )

    def _save(self, names: Sequence[bytes], blocks: Sequence[int], on_end: Callable[[], None]) -> None:
        self.saved.append((list(names), list(blocks)))
        on_end()

    def save_again(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Return the result of ``save_again``, which waits for a step in a thread of its own."""
        answers: list[tuple[int, int]] = []
        asking = threading.Thread(target=lambda: answers.append(self.cached.save_again(names)), daemon=True)
        asking.start()
        wait_until(lambda: bool(self.posts), "the function for the next step")
        self.posts.pop()()
        asking.join(10.0)
        return answers[0]


A, B, C, D = b"a", b"b", b"c", b"d"


def test_the_latest_saves_are_listed_first_and_each_save_from_its_beginning() -> None:
    scheduler = Scheduler()
    scheduler.cached.note_blocks([A, B], [1, 2])
    scheduler.cached.note_blocks([C], [3])
    assert scheduler.cached.list_saved_blocks(9) == [C, A, B]
    assert scheduler.cached.list_saved_blocks(2) == [C, A]
    scheduler.cached.note_blocks([B], [2])
    assert scheduler.cached.list_saved_blocks(9) == [B, C, A], "B was saved again"


def test_blocks_with_new_contents_are_not_listed() -> None:
    scheduler = Scheduler()
    scheduler.blocks[0].block_hash = scheduler.blocks[1].block_hash = None
    scheduler.cached.note_blocks([A, B, C], [1, 2, 3])
    assert scheduler.cached.list_saved_blocks(9) == [B, C], "the first was not cached"
    scheduler.blocks[2].block_hash = "another"
    assert scheduler.cached.list_saved_blocks(9) == [C]
    scheduler.blocks[3].block_hash = None
    assert scheduler.cached.list_saved_blocks(9) == []


def test_blocks_without_a_hash_of_their_own_are_not_noted() -> None:
    scheduler = Scheduler()
    scheduler.blocks[1] = SimpleNamespace()
    scheduler.cached.note_blocks([A], [1])
    assert scheduler.cached.list_saved_blocks(9) == []


def test_the_oldest_blocks_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NAMES", 2)
    scheduler = Scheduler()
    scheduler.cached.note_blocks([A], [1])
    scheduler.cached.note_blocks([B], [2])
    assert scheduler.cached.list_saved_blocks(9) == [B, A]
    scheduler.cached.note_blocks([C], [3])
    assert scheduler.cached.list_saved_blocks(9) == [C, B]


def test_a_reset_forgets_all_blocks() -> None:
    scheduler = Scheduler()
    scheduler.cached.note_blocks([A], [1])
    scheduler.cached.forget_all()
    assert scheduler.cached.list_saved_blocks(9) == []
    assert scheduler.save_again([A]) == (0, 0)


def test_the_blocks_that_are_still_cached_are_saved_again_and_counted() -> None:
    scheduler = Scheduler()
    scheduler.cached.note_blocks([A, B, C], [1, 2, 3])
    scheduler.blocks[2].block_hash = "another"
    assert scheduler.save_again([A, B, C, D]) == (2, 2)
    assert scheduler.saved == [([A, C], [1, 3])]


def test_a_block_is_counted_only_if_every_rank_has_it() -> None:
    scheduler = Scheduler(9, 1)
    scheduler.cached.note_blocks([A, B, C], [1, 2, 3])
    assert scheduler.save_again([A, B, C]) == (3, 1)


def test_the_end_of_a_round_restores_the_order_of_reuse() -> None:
    scheduler = Scheduler()
    scheduler.cached.note_blocks([A, B, C], [1, 2, 3])
    scheduler.blocks[2].block_hash = None
    scheduler.cached.end_round([A, B, C])
    assert scheduler.touched == []
    scheduler.posts.pop()()
    assert scheduler.touched == [[3, 1]]


def test_without_a_step_before_the_deadline_no_block_is_saved_then_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    scheduler = Scheduler()
    scheduler.cached.note_blocks([A], [1])
    assert scheduler.cached.save_again([A]) == (1, 0)
    scheduler.posts.pop()()
    assert scheduler.saved == []


def test_close_ends_the_wait_for_a_step() -> None:
    scheduler = Scheduler()
    answers: list[tuple[int, int]] = []
    asking = threading.Thread(target=lambda: answers.append(scheduler.cached.save_again([A])), daemon=True)
    asking.start()
    wait_until(lambda: bool(scheduler.posts), "the function for the next step")
    scheduler.cached.close()
    asking.join(10.0)
    assert answers == [(1, 0)]
