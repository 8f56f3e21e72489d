"""The cache of an instance according to its KV events. The instance is simulated: its tokens are parts of the text."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence

import pytest

from router.policies import InstanceLoad, iterate_names, pack_tokens, seed_of
from router.policies.base import Outcome, RequestFeatures, request_features
from router.policies.cached_blocks import CachedBlocks, PlacedPrompt
from router.policies.pool_aware import PoolAware

SIZE = 64
CHARACTERS_PER_TOKEN = 3  # the router assumes 4
# The place where two texts diverge or a cached one ends is known up to a chunk of text and a block.
TOLERANCE = 512 / CHARACTERS_PER_TOKEN + SIZE


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class ModelInstance:
    """An instance that caches complete blocks, evicts the least recently used one, and reports events."""

    def __init__(self, cache: CachedBlocks, capacity: int) -> None:
        self.cache, self.capacity = cache, capacity
        self.blocks: OrderedDict[int, int] = OrderedDict()

    def serve(self, prompt: str, answer: str) -> tuple[int, int]:
        """Return the number of tokens of the prompt, and the number of cached ones."""
        count = len(prompt) // CHARACTERS_PER_TOKEN
        hashes = self._hash(prompt + answer)
        whole = count // SIZE
        most = (count - 1) // SIZE  # an engine computes at least the last token
        hit = next((i for i, each in enumerate(hashes[:most]) if each not in self.blocks), most)
        for each in reversed(hashes[:hit]):
            self.blocks.move_to_end(each)
        # As in an engine, an event has the blocks of a prompt, and one event has each block of the response.
        places = [range(hit, whole), *(range(place, place + 1) for place in range(max(hit, whole), len(hashes)))]
        for stored in places:
            new = [hashes[place] for place in stored if hashes[place] not in self.blocks]
            if new:
                parent = hashes.index(new[0]) - 1
                self.cache.store_blocks(new, hashes[parent] if parent >= 0 else None, SIZE)
            self.blocks |= {hashes[place]: place for place in stored}
        for each in reversed(hashes):  # the end of a sequence is evicted before its start
            self.blocks.move_to_end(each)
        removed = [self.blocks.popitem(last=False)[0] for _ in range(max(0, len(self.blocks) - self.capacity))]
        self.cache.remove_blocks(removed)
        return count, hit * SIZE

    def clear(self) -> None:
        self.blocks.clear()

    def _hash(self, text: str) -> list[int]:
        step = SIZE * CHARACTERS_PER_TOKEN
        return [hash(text[:end]) for end in range(step, len(text) + 1, step)]


class PolicyWithInstance:
    """A policy with one instance that publishes events."""

    def __init__(self, capacity: int) -> None:
        self.clock = Clock()
        self.policy = PoolAware(clock=self.clock)
        self.cache = self.policy.watch_cache("a")
        self.policy.set_exact("a", is_exact=True)
        self.instance = ModelInstance(self.cache, capacity)

    def ask(self, prompt: str, answer: str) -> tuple[str, float, int]:
        """Return the state of the known cache, and the numbers of expected and of actual cached tokens."""
        self.clock.now += 1
        features = self.features(prompt)
        decision = self.policy.choose_instance(features, [InstanceLoad("a")])
        count, cached = self.instance.serve(prompt, answer)
        generated = len(answer) // CHARACTERS_PER_TOKEN
        self.policy.observe_outcome(features, decision, Outcome("a", 0, 0.1, count, cached, cached, generated, 0.5))
        self.clock.now += 1
        self.policy.settle_cache("a")
        expected = float(decision.reasons["own_tokens"]) * count / features.prompt_tokens
        return str(decision.reasons["own_known"]), float(decision.reasons.get("own_engine_tokens", expected)), cached

    def features(self, prompt: str) -> RequestFeatures:
        return request_features({"prompt": prompt}, len(prompt) // 4)


def words(chance: random.Random, count: int) -> str:
    return "".join(f"{chance.randrange(10**7):07d} " for _ in range(count))


def test_the_next_turn_is_expected_to_hit_the_last_turn_and_its_response() -> None:
    chance, placed = random.Random(1), PolicyWithInstance(capacity=10_000)
    prompt = words(chance, 500)
    for turn in range(5):
        answer = words(chance, 60)
        known, expected, cached = placed.ask(prompt, answer)
        assert (known, expected) == ("exact", cached if turn else 0)
        prompt += answer + words(chance, 30)


def test_evicted_blocks_are_not_expected() -> None:
    chance, placed = random.Random(2), PolicyWithInstance(capacity=100)
    first = words(chance, 700)
    placed.ask(first, "")
    placed.ask(words(chance, 1500), "")
    known, expected, cached = placed.ask(first + words(chance, 50), "")
    assert known in ("exact", "learned")
    assert abs(expected - cached) <= TOLERANCE


def test_no_blocks_are_expected_after_a_clear() -> None:
    chance, placed = random.Random(3), PolicyWithInstance(capacity=1000)
    prompt = words(chance, 500)
    placed.ask(prompt, "")
    placed.instance.clear()
    placed.policy.empty_cache("a")
    assert placed.ask(prompt, "") == ("exact", 0, 0)
    known, expected, cached = placed.ask(prompt + words(chance, 90), "")
    assert (known, expected) == ("exact", cached)


def test_a_prompt_that_diverges_from_a_conversation_is_not_expected_to_hit_its_response() -> None:
    chance, placed = random.Random(4), PolicyWithInstance(capacity=1000)
    prompt, answer = words(chance, 500), words(chance, 200)
    placed.ask(prompt, answer)
    _, expected, cached = placed.ask(prompt[:-80] + words(chance, 300), "")
    assert abs(expected - cached) <= TOLERANCE


@pytest.mark.parametrize("seed", range(20))
def test_an_exact_expectation_is_right_after_any_requests_and_evictions(seed: int) -> None:
    chance = random.Random(seed)
    placed = PolicyWithInstance(capacity=chance.choice((50, 150, 400, 5000)))
    conversations = [words(chance, chance.randrange(70, 400)) for _ in range(8)]
    wrong = []
    for _ in range(60):
        number = chance.randrange(len(conversations))
        answer = words(chance, chance.randrange(0, 80))
        known, expected, cached = placed.ask(conversations[number], answer)
        if known == "exact" and abs(expected - cached) > TOLERANCE:
            wrong.append((expected, cached))
        if chance.random() < 0.1:
            placed.instance.clear()
            placed.policy.empty_cache("a")
        if chance.random() < 0.8:
            conversations[number] += answer + words(chance, chance.randrange(1, 40))
        assert set(placed.instance.blocks) == set(placed.cache)
    assert not wrong


def prompt_of(chunks: Sequence[int], tokens: int, *, sent_at: float = 0.0, cached: int = 0) -> PlacedPrompt:
    return PlacedPrompt(chunks, 100.0, b"", tokens, cached, tokens, sent_at, sent_at + 1)


def test_a_prompt_is_not_associated_if_two_chains_fit() -> None:
    clock, dropped = Clock(), list[int]()
    cache = CachedBlocks(dropped.extend, clock)
    cache.store_blocks([1, 2], None, 100)
    cache.store_blocks([3, 4], None, 100)
    cache.note_prompt(prompt_of([11, 12], 200, sent_at=clock.now - 1))
    clock.now += 1
    assert cache.settle() == []
    assert not cache.has_chunk(11)


def test_a_prompt_is_not_associated_after_an_eviction_of_other_chains_that_fit() -> None:
    clock = Clock()
    cache = CachedBlocks(lambda _: None, clock)
    prompt = prompt_of([11, 12], 200, sent_at=clock.now)
    cache.note_prompt(prompt)
    cache.store_blocks([1, 2], None, 100)
    cache.store_blocks([3, 4], None, 100)
    clock.now += 2
    assert cache.settle() == []
    for block in (2, 4):
        cache.remove_blocks([block])
        clock.now += 2
        assert cache.settle() == []


def test_a_chain_that_belongs_to_one_prompt_does_not_fit_another() -> None:
    clock = Clock()
    cache = CachedBlocks(lambda _: None, clock)
    first, second = prompt_of([11], 200, sent_at=clock.now), prompt_of([12], 200, sent_at=clock.now)
    cache.store_blocks([1, 2], None, 100)
    cache.associate(first, 2)
    cache.store_blocks([3, 4], None, 100)
    cache.note_prompt(second)
    clock.now += 2
    assert cache.settle() == [(second, 4)]


@pytest.mark.parametrize("size", [1, 100])
def test_a_prompt_is_found_in_an_event_that_also_has_its_response(size: int) -> None:
    clock = Clock()
    cache = CachedBlocks(lambda _: None, clock)
    for first in (0, 1000):  # the first one has the same length, but is older
        clock.now += 10
        cache.store_blocks(range(first, first + 2), None, size)
        cache.store_blocks(range(first + 2, first + 7), first + 1, size)  # SGLang merges them
    prompt = prompt_of([11, 12], 5 * size, sent_at=clock.now)._replace(total_tokens=7 * size + 1)
    cache.note_prompt(prompt)
    clock.now += 2
    assert cache.settle() == [(prompt, 1004)]
    assert cache.find_end(12, b"more") == (7 * size, 100.0)


def test_a_part_of_a_block_does_not_change_the_size_of_blocks() -> None:
    cache = CachedBlocks(lambda _: None)
    tokens = pack_tokens(list(range(10)))
    cache.store_blocks([1, 2], None, 4, tokens[:32])
    cache.store_blocks([3], 2, 2, tokens[32:])  # as vLLM does with the end of a prompt, if groups have several sizes
    list(cache.name_blocks())
    assert cache.block_size == 4
    assert cache.count_named(iterate_names(tokens, cache.block_size, seed_of("", ""))) == 2
    cache.clear()
    cache.store_blocks([1], None, 2)
    assert cache.block_size == 2


def test_a_block_with_two_copies_is_cached_until_both_are_evicted() -> None:
    dropped = list[int]()
    cache = CachedBlocks(dropped.extend)
    for _ in range(2):  # as vLLM does with the last block of a completely cached prompt
        cache.store_blocks([1, 2, 3], None, 100)
    cache.associate(prompt_of([11, 12, 13], 300), 3)
    cache.remove_blocks([3, 2])
    assert (list(cache), dropped) == ([1, 2, 3], [])
    cache.remove_blocks([3, 1, 1])
    assert (list(cache), sorted(dropped)) == ([2], [11, 12, 13])
    cache.clear()
    cache.store_blocks([1], None, 100)
    cache.remove_blocks([1])
    assert not list(cache)


def test_a_response_is_expected_up_to_the_block_after_which_two_continue() -> None:
    cache = CachedBlocks(lambda _: None)
    for block, parent in ((1, None), (2, 1), (3, 2), (4, 2)):
        cache.store_blocks([block], parent, 100)
    cache.associate(prompt_of([11], 100)._replace(total_tokens=300), 1)
    assert cache.find_end(11, b"more") == (200, 100.0)


def test_a_prompt_waits_for_late_events() -> None:
    clock = Clock()
    cache = CachedBlocks(lambda _: None, clock)
    cache.note_prompt(prompt_of([11, 12], 200, sent_at=clock.now - 1))
    clock.now += 1
    assert cache.settle() == []
    assert not cache.is_settled
    cache.store_blocks([1, 2], None, 100)
    clock.now += 1
    assert [leaf for _, leaf in cache.settle()] == [2]
    assert cache.is_settled


def test_the_removal_of_a_block_removes_the_chunks_of_all_following_blocks() -> None:
    clock, dropped = Clock(), list[int]()
    cache = CachedBlocks(dropped.extend, clock)
    cache.store_blocks([1, 2, 3], None, 100)
    prompt = prompt_of([11, 12, 13], 300)
    cache.associate(prompt, 3)
    cache.remove_blocks([2])
    assert sorted(dropped) == [12, 13]
    assert (cache.has_chunk(11), len(cache)) == (True, 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_chunk_is_lost_with_its_block_and_with_each_block_before_it(seed: int) -> None:
    chance, dropped = random.Random(seed), list[int]()
    cache, stored, placed = CachedBlocks(dropped.extend), Counter[int](), dict[int, list[int]]()
    for _ in range(200):
        prompt = tuple(chance.randrange(2) for _ in range(chance.randrange(1, 8)))
        hashes = [hash(("block", prompt[: end + 1])) for end in range(len(prompt))]
        known = next((i for i, each in enumerate(hashes) if each not in stored), len(hashes))
        if chance.random() < 0.5:
            first = min(known, chance.randrange(8))  # a concurrent request stores blocks again
            cache.store_blocks(hashes[first:], hashes[first - 1] if first else None, 10)
            stored.update(hashes[first:])
            known = len(hashes)
        elif stored:
            some = chance.sample(sorted(stored), min(len(stored), chance.randrange(1, 5)))
            removed = hashes[:known][::-1] if chance.random() < 0.5 else some
            cache.remove_blocks(removed)
            stored -= Counter(removed)
            lost = {chunk for chunk, path in placed.items() if not stored.keys() >= set(path)}
            assert sorted(lost) == sorted(dropped)
            for chunk in lost:
                del placed[chunk]
            dropped.clear()
            continue
        if known and chance.random() < 0.5:
            chunks = [hash(("chunk", prompt[: end + 1])) for end in range(known)]
            cache.associate(PlacedPrompt(chunks, 10.0, b"", 10 * known, 0, 10 * known, 0.0, 1.0), hashes[known - 1])
            placed |= {chunk: hashes[: end + 1] for end, chunk in enumerate(chunks)}
        assert set(cache) == stored.keys()
        assert set(cache.chunks) == placed.keys()


def test_a_prompt_of_another_process_is_associated_by_its_last_block() -> None:
    clock = Clock()
    cache = CachedBlocks(lambda _: None, clock)
    prompt = prompt_of([11, 12], 200, sent_at=clock.now)
    cache.note_prompt(prompt, 2)
    assert cache.settle() == []
    cache.store_blocks([1, 2], None, 100)
    assert cache.settle() == []
    assert cache.has_chunk(12)


def test_removed_blocks_leave_no_data() -> None:
    chance, placed = random.Random(5), PolicyWithInstance(capacity=60)
    for _ in range(30):
        placed.ask(words(chance, 100), words(chance, 20))
        placed.ask(words(chance, 100), "")
    placed.instance.clear()
    placed.cache.remove_blocks(list(placed.cache))
    assert (len(placed.cache), list(placed.cache.chunks)) == (0, [])
    names = ("_orphans", "_run_of_chunk", "_tips", "_leaves")
    sizes = [len(vars(placed.cache)[name]) for name in names]
    assert sizes == [0] * len(names)


@pytest.mark.parametrize("seed", range(30))
def test_contradictory_events_cause_no_error(seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    cache = CachedBlocks(lambda _: None, clock)
    if seed % 2:
        list(cache.name_blocks())
    for _ in range(300):
        hashes = [chance.randrange(6) for _ in range(chance.randrange(1, 4))]
        parent = chance.choice((None, chance.randrange(6)))
        if chance.random() < 0.6:
            tokens = pack_tokens([chance.randrange(2) for _ in range(chance.choice((0, 16, 64, 192)))])
            cache.store_blocks(hashes, parent, chance.choice((16, 64)), tokens)
        elif chance.random() < 0.8:
            cache.remove_blocks(hashes)
        else:
            cache.note_prompt(prompt_of([chance.randrange(5)], chance.randrange(1, 300), sent_at=clock.now))
            clock.now += chance.choice((0.1, 2.0))
            cache.settle()
    cache.forget_copies()
    cache.remove_blocks(range(6))
    assert (len(cache), list(cache.chunks), cache._by_name) == (0, [], {})


@pytest.mark.parametrize("seed", range(10))
def test_a_prefix_is_found_by_its_tokens_up_to_its_last_cached_block(seed: int) -> None:
    chance = random.Random(seed)
    cache, stored = CachedBlocks(lambda _: None), dict[tuple[int, ...], int]()
    naming = cache.name_blocks()  # events arrive before, between and after its steps
    for step in range(200):
        if step == 50:
            next(naming, None)
        elif step == 100:
            list(naming)
        prompt = [chance.randrange(2) for _ in range(4 * chance.randrange(1, 7))]
        prefixes = [tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)]
        if chance.random() < 0.7:
            known = next((i for i, each in enumerate(prefixes) if each not in stored), len(prefixes))
            hashes = [1000 * step + place for place in range(known, len(prefixes))]
            parent = stored[prefixes[known - 1]] if known else None
            tokens = pack_tokens(prompt[4 * known :])
            cache.store_blocks(hashes, parent, 4, tokens, seed_of("", ""))
            stored |= dict(zip(prefixes[known:], hashes, strict=True))
        elif stored:
            gone = chance.choice(list(stored))
            for each in [each for each in stored if each[: len(gone)] == gone]:
                cache.remove_blocks([stored.pop(each)])
        expected = next((i for i, each in enumerate(prefixes) if each not in stored), len(prefixes))
        if step >= 100:
            assert cache.count_named(iterate_names(pack_tokens(prompt), 4, seed_of("", ""))) == expected
        assert cache.count_leading([stored.get(each, -1) for each in prefixes]) == expected
    assert cache.block_size == (4 if stored else 0)


@pytest.mark.parametrize("is_packed", [True, False])
def test_blocks_have_names_if_other_blocks_of_their_event_were_cached_already(is_packed: bool) -> None:
    cache, tokens = CachedBlocks(lambda _: None), pack_tokens(list(range(12)))
    cache.store_blocks([1], None, 2, tokens[:8])
    cache.store_blocks([3], 2, 2, tokens[16:24])
    cache.store_blocks([1, 2, 3, 4, 5], None, 2, tokens[:40] if is_packed else lambda: tokens[:40])
    cache.store_blocks([6], 5, 2, tokens[40:])
    list(cache.name_blocks())
    assert cache.count_named(iterate_names(tokens, 2, seed_of("", ""))) == 6


@pytest.mark.parametrize("is_encoded", [False, True])
def test_a_block_without_tokens_is_not_found_by_the_tokens_of_a_block_that_was_removed(*, is_encoded: bool) -> None:
    cache, tokens = CachedBlocks(lambda _: None), pack_tokens([1] * 12)
    cache.store_blocks([1, 2], None, 4, (lambda: tokens) if is_encoded else tokens)  # these are tokens of three blocks
    cache.remove_blocks([2])
    cache.store_blocks([3, 4], 1, 4)
    list(cache.name_blocks())
    assert cache.count_named(iterate_names(tokens, 4, seed_of("", ""))) == 1


def test_the_tokens_of_an_event_are_decoded_once() -> None:
    cache, num_calls = CachedBlocks(lambda _: None), 0

    def decode() -> bytes:
        nonlocal num_calls
        num_calls += 1
        return pack_tokens([1] * 100)

    for block in range(0, 100, 2):
        cache.store_blocks([block], block - 2 if block else None, 1)
    cache.store_blocks(range(100), None, 1, decode)
    list(cache.name_blocks())
    assert num_calls == 1


class CountedHash(bytes):
    """A block hash that counts its look-ups and comparisons."""

    num_used = 0

    def __eq__(self, other: object) -> bool:
        CountedHash.num_used += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        CountedHash.num_used += 1
        return super().__hash__()


def test_the_work_for_an_event_does_not_grow_with_the_length_of_a_common_prefix() -> None:
    CountedHash.num_used = 0
    cache = CachedBlocks(lambda _: None)
    trunk, others = ([CountedHash([kind, *divmod(place, 256)]) for place in range(4096)] for kind in (0, 1))
    for at in range(0, len(trunk), 256):
        cache.store_blocks(trunk[at : at + 256], trunk[at - 1] if at else None, 16)
    for parent, block in zip(trunk, others, strict=True):
        cache.store_blocks([block], parent, 16)
    cache.remove_blocks(trunk[:1])
    assert CountedHash.num_used < 300 * len(trunk)
    assert len(cache) == 2 * len(trunk) - 1


def test_an_event_can_remove_blocks_in_any_order() -> None:
    CountedHash.num_used = 0
    cache = CachedBlocks(lambda _: None)
    first, second = ([CountedHash([kind, *divmod(place, 256)]) for place in range(1000)] for kind in (0, 1))
    cache.store_blocks(first, None, 16)
    cache.store_blocks(second, None, 16)
    cache.remove_blocks([block for pair in zip(first, second, strict=True) for block in pair])
    assert len(cache) == 0
    assert CountedHash.num_used < 40 * len(first)


def test_blocks_after_an_unknown_block_are_not_orphans_when_it_is_stored() -> None:
    cache = CachedBlocks(lambda _: None)
    cache.store_blocks([2], 1, 16)
    cache.store_blocks([1], None, 16)
    cache.store_blocks([3], 1, 16)
    assert (list(cache), cache._orphans) == ([2, 1, 3], {})


def test_chunks_of_an_exact_instance_without_a_known_block_expire() -> None:
    chance, placed = random.Random(6), PolicyWithInstance(capacity=10_000)
    known, unknown = words(chance, 300), words(chance, 300)
    placed.ask(known, "")
    placed.policy._kept_seconds = 60.0
    longer = known + unknown  # there are no events for the added part, so it is not associated
    placed.policy.choose_instance(placed.features(longer), [InstanceLoad("a")])
    placed.policy.choose_instance(placed.features(unknown), [InstanceLoad("a")])
    expected = [len(longer) // 4, len(unknown) // 4]
    assert [own_tokens(placed, each) for each in (longer, unknown)] == pytest.approx(expected, abs=200)
    placed.clock.now += 100
    expected = [len(known) // 4, 0]
    assert [own_tokens(placed, each) for each in (longer, unknown)] == pytest.approx(expected, abs=200)


def own_tokens(placed: PolicyWithInstance, prompt: str) -> float:
    """Return the number of a prompt's tokens that the policy expects in the instance's cache."""
    features = placed.features(prompt)
    matches = placed.policy._index.look_up(features.chunks, placed.policy._kept_seconds)
    return matches.own.get("a", 0) * features.tokens_per_chunk
