"""Instances with windows and recurrent layers have fewer cached tokens than their prefixes. They are simulated."""

from __future__ import annotations

from collections import OrderedDict

from router.policies import InstanceLoad, Outcome, RequestFeatures, resume_points
from router.policies.base import request_features
from router.policies.pool_aware import PoolAware
from router.policies.resume_points import ResumePoints

CHUNK = 1000
SHARED = (1, 2, 3, 4)


class Windowed:
    """An instance with all blocks of its layers with full attention, but only the last used blocks of its windows."""

    def __init__(self, num_window_blocks: int, window: int = 2) -> None:
        self.num_window_blocks, self.window = num_window_blocks, window
        self.full = set[tuple[int, ...]]()
        self.windows = OrderedDict[tuple[int, ...], None]()

    def serve(self, chunks: tuple[int, ...]) -> int:
        """Return the number of cached chunks."""
        prefixes = [chunks[:end] for end in range(1, len(chunks) + 1)]
        resumed = next((end for end in range(len(chunks) - 1, 0, -1) if self._can_resume(prefixes[:end])), 0)
        self.full.update(prefixes)
        for prefix in prefixes[max(0, resumed - self.window) :]:
            self.windows[prefix] = None
            self.windows.move_to_end(prefix)
            while len(self.windows) > self.num_window_blocks:
                self.windows.popitem(last=False)
        return resumed

    def _can_resume(self, prefixes: list[tuple[int, ...]]) -> bool:
        return self.full.issuperset(prefixes) and all(each in self.windows for each in prefixes[-self.window :])


class Recurrent:
    """An instance with a state only at the end of each prompt."""

    def __init__(self) -> None:
        self.ends = set[tuple[int, ...]]()

    def serve(self, chunks: tuple[int, ...]) -> int:
        resumed = max((end for end in range(len(chunks)) if chunks[:end] in self.ends), default=0)
        self.ends.add(chunks)
        return resumed


class Router:
    """A policy and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.policy = PoolAware(clock=lambda: self.now)
        self._fresh = 100

    def ask(self, instance: Windowed | Recurrent, *chunks: int, key: str = "a") -> tuple[int, int]:
        """Send a prompt, and return the numbers of expected and of actual cached chunks."""
        self.now += 1
        features = RequestFeatures(CHUNK * len(chunks), lambda: chunks, tokens_per_chunk=CHUNK)
        decision = self.policy.choose_instance(features, [InstanceLoad(key)])
        cached = instance.serve(chunks)
        self.now += 1
        usage = len(chunks) * CHUNK, cached * CHUNK
        self.policy.observe_outcome(features, decision, Outcome(key, 0.0, 0.1, *usage, seconds=1.0))
        return decision.cached_tokens // CHUNK, cached

    def ask_more(self, instance: Windowed | Recurrent, key: str = "a") -> tuple[int, int]:
        """Send the shared prefix with a new end."""
        self._fresh += 5
        return self.ask(instance, *SHARED, *range(self._fresh, self._fresh + 5), key=key)


def test_a_window_that_is_lost_repeatedly_is_no_longer_expected() -> None:
    router, instance = Router(), Windowed(num_window_blocks=4)
    assert [router.ask_more(instance) for _ in range(5)] == [(0, 0), (4, 0), (4, 0), (0, 0), (0, 0)]
    instance.num_window_blocks = 100
    assert [router.ask_more(instance) for _ in range(3)] == [(0, 0), (0, 4), (4, 4)]


def test_a_window_that_was_lost_once_is_expected_after_it_is_computed_again() -> None:
    router, instance = Router(), Windowed(num_window_blocks=100)
    assert [router.ask_more(instance) for _ in range(2)] == [(0, 0), (4, 4)]
    del instance.windows[SHARED]
    assert [router.ask_more(instance) for _ in range(2)] == [(4, 3), (4, 4)]
    instance.windows.clear()
    assert [router.ask_more(instance) for _ in range(3)] == [(4, 0), (4, 4), (4, 4)]


def test_a_recurrent_layer_resumes_at_the_end_of_a_prompt_not_where_two_diverge() -> None:
    router, instance = Router(), Recurrent()
    assert router.ask(instance, *SHARED[:2]) == (0, 0)
    assert [router.ask_more(instance) for _ in range(4)] == [(2, 2), (4, 2), (4, 2), (2, 2)]
    assert router.ask(instance, *SHARED) == (2, 2)  # from now on there is a state at the end of the prefix
    assert [router.ask_more(instance) for _ in range(2)] == [(2, 4), (4, 4)]


def test_the_pool_has_its_own_resume_points() -> None:
    router, first, second = Router(), Windowed(num_window_blocks=100), Windowed(num_window_blocks=4)
    router.ask_more(first)
    for fresh in range(2):  # the prefix is new for each instance, so only the pool can have it
        assert router.ask_more(Windowed(100), key=f"new {fresh}") == (4, 0)
    assert router.ask_more(second, key="b") == (0, 0)
    assert router.ask_more(first) == (4, 4)


def test_concurrent_requests_do_not_confirm_each_other() -> None:
    now = 0.0
    points = ResumePoints(100.0, lambda: now)
    for now in (10.0, 10.1, 10.2):
        points.observe("a", 7, 4, 0, sent_at=now - 1)
        assert points.find("a", 7, 4) == 4
    now = 12.0
    points.observe("a", 7, 4, 1, sent_at=10.5)
    assert [points.find(key, chunk, 4) for key, chunk in (("a", 7), ("a", 8), ("b", 7))] == [1, 4, 4]
    points.observe("a", 7, 4, 3, sent_at=11.0)  # within one chunk of the end
    assert points.is_empty


def test_resume_points_are_removed_with_the_cache_with_time_and_above_a_limit() -> None:
    now = 0.0
    points = ResumePoints(100.0, lambda: now)
    for now in (0.0, 1.0):
        for key in ("a", "b"):
            points.observe(key, 7, 4, 0, sent_at=now)
    points.forget("a")
    assert [points.find(key, 7, 4) for key in "ab"] == [4, 0]
    now = 102.0
    points.observe("a", 8, 4, 4, sent_at=now)
    assert points.is_empty
    for chunk in range(resume_points._MAX_ENTRIES + 1):
        points.observe("a", chunk, 4, 0, sent_at=now)
    assert len(points._ends) == resume_points._MAX_ENTRIES


def ask_with_usage(
    policy: PoolAware, chunks: int, estimated: int, counted: int, cached: int, *, reads_cache: bool = True
) -> int:
    """Send a prompt with different estimated and counted tokens, and return the expected cached tokens."""
    features = RequestFeatures(estimated, lambda: range(chunks), tokens_per_chunk=CHUNK, reads_cache=reads_cache)
    decision = policy.choose_instance(features, [InstanceLoad("a")])
    policy.observe_outcome(features, decision, Outcome("a", 0.0, 0.1, counted, cached))
    return decision.cached_tokens


def test_a_full_hit_counts_although_the_router_estimates_fewer_tokens() -> None:
    policy = PoolAware(clock=lambda: 0.0)
    ask_with_usage(policy, 8, 8 * CHUNK, 8 * CHUNK, 0)
    for _ in range(3):  # the tokens of an image are not estimated
        ask_with_usage(policy, 8, 8 * CHUNK, 24 * CHUNK, 8 * CHUNK)
    assert ask_with_usage(policy, 9, 9 * CHUNK, 9 * CHUNK, 8 * CHUNK) == 8 * CHUNK


def test_requests_that_do_not_read_the_cache_do_not_change_resume_points() -> None:
    policy = PoolAware(clock=lambda: 0.0)
    ask_with_usage(policy, 8, 8 * CHUNK, 8 * CHUNK, 0)
    for _ in range(3):
        ask_with_usage(policy, 8, 8 * CHUNK, 8 * CHUNK, 0, reads_cache=False)
    assert ask_with_usage(policy, 9, 9 * CHUNK, 9 * CHUNK, 8 * CHUNK) == 8 * CHUNK
    assert not request_features({"prompt": "word " * 1000, "prompt_logprobs": 1}, 1000).reads_cache


def test_requests_that_do_not_read_the_cache_do_not_change_the_retention_time() -> None:
    now = [0.0]
    policy = PoolAware(clock=lambda: now[0])
    ask_with_usage(policy, 8, 8 * CHUNK, 8 * CHUNK, 0)
    for _ in range(60):
        ask_with_usage(policy, 8, 8 * CHUNK, 8 * CHUNK, 0, reads_cache=False)
    now[0] = 10.0
    features = RequestFeatures(9 * CHUNK, lambda: range(9), tokens_per_chunk=CHUNK)
    assert policy.choose_instance(features, [InstanceLoad("a")]).reasons["own_tokens"] == 8 * CHUNK
