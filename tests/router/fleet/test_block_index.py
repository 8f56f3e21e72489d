"""Queries of other schedulers for cached blocks: the examples of Mooncake's conductor and RFC 1403, and of Dynamo.

**Conductor**: Mooncake, branch ``dev/conductor``, ``docs/source/design/conductor/indexer-api-design.md`` and
``mooncake-conductor/example/cache_aware_disagg_proxy.py`` (August 2026). **RFC**: Mooncake, issue 1403 and
``docs/source/api-reference/http/conductor-indexer.md``. **Dynamo**: ``docs/components/router/standalone-indexer.md`` of
1.5 and ``lib/kv-router/src/services/``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgpack
import orjson
import pytest
import xxhash

from kvcommon.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from router.fleet import block_index, kv_events
from router.fleet.kv_event_feed import Publisher
from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import StandIn
from tests.support.kv_events import EventPublisher, event_publisher
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]

MODEL = "llama-3-8b"
SIZE = 16


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    with event_publisher() as publisher:
        yield publisher


@pytest.fixture
def router(make_router: MakeRouter) -> RouterUnderTest:
    return make_router(kv_events=True)


def make_event(tokens: Sequence[int], hashes: Sequence[int], parent: int | None = None, **members: Any) -> BlockStored:
    return BlockStored(list(hashes), parent, list(tokens), SIZE, **members)


def register(router: RouterUnderTest, publisher: EventPublisher, **changes: Any) -> httpx.Response:
    """Register as in Dynamo's documentation."""
    fields = {"instance_id": 1, "model_name": MODEL, "block_size": SIZE, **publisher.fields, **changes}
    return router.client.post("/register", json=fields)


def ask(router: RouterUnderTest, path: str = "/query", **members: Any) -> dict[str, Any]:
    response = router.client.post(path, json={"model_name": MODEL, **members})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def publishers_of(router: RouterUnderTest) -> dict[str, Publisher]:
    assert router.app.kv_events
    return router.app.kv_events.publishers


def wait_for_match(
    router: RouterUnderTest, publisher: EventPublisher, tokens: int, instance: str = "1", **question: Any
) -> dict[str, Any]:
    """Wait until the index has this number of the prompt's tokens for an instance, and return its entry."""
    found: dict[str, Any] = {}

    def is_known() -> bool:
        publisher.answer_replays()
        found.update(ask(router, **question)["instances"].get(instance, {}))
        return found.get("longest_matched") == tokens

    wait_until(is_known, f"{instance} to have {tokens} tokens")
    return found


def pack(router: RouterUnderTest, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Send a request in the form of the conductor's example proxy, and return the answer."""
    content = msgpack.packb(fields, use_bin_type=True)
    response = router.client.post(path, content=content, headers={"Content-Type": "application/msgpack"})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/msgpack"), response.text
    answer: dict[str, Any] = msgpack.unpackb(response.content, raw=False)
    return answer


def entry(tokens: int, rank: str = "0") -> dict[str, Any]:
    """Return the conductor's result for an instance with one rank and all tokens in its own cache."""
    matches = {rank: {"gpu": tokens, "cpu": tokens, "disk": tokens}}
    counts = dict.fromkeys(("longest_matched", "gpu", "cpu", "disk"), tokens)
    return {**counts, "dp": {rank: tokens}, "rank_matches": matches}


class TestConductor:
    """Mooncake's conductor: msgpack, ``modelname``, ranks."""

    registration: ClassVar[dict[str, Any]] = {
        "type": "vLLM",
        "modelname": "test-model",
        "instance_id": "engine-a",
        "block_size": SIZE,
        "dp_rank": 0,
        "tenant_id": "default",
        "lora_name": "",
        "hash_profile": {
            "strategy": "vllm_v1",
            "algorithm": "sha256_cbor",
            "python_hash_seed": "0",
            "index_projection": "low64_be",
        },
    }

    def ask_for(self, router: RouterUnderTest, publisher: EventPublisher, tokens: Sequence[int]) -> dict[str, Any]:
        publisher.answer_replays()
        packed = struct.pack(f"<{len(tokens)}i", *tokens)
        return pack(router, "/query", {"model": "test-model", "block_size": SIZE, "token_ids": packed})

    def test_its_example_gets_the_answer_of_its_documentation(
        self, router: RouterUnderTest, publisher: EventPublisher
    ) -> None:
        registration = {**self.registration, **publisher.fields}
        registered = {"status": "registered successfully", "instance_id": "engine-a"}
        assert [pack(router, "/register", registration) for _ in range(2)] == [registered, registered]
        tokens = range(48)
        wait_until(
            lambda: self.ask_for(router, publisher, tokens)["instances"] == {"engine-a": entry(0)}, "the empty cache"
        )
        publisher.publish(make_event(range(32), [7, 8]))
        wait_until(
            lambda: self.ask_for(router, publisher, tokens)["instances"] == {"engine-a": entry(32)}, "two blocks"
        )
        assert pack(router, "/unregister", {"instance_id": "engine-a", "dp_rank": 0}) == {
            "status": "unregistered successfully",
            "removed_instances": ["engine-a|default|0"],
        }
        assert self.ask_for(router, publisher, tokens) == {"instances": {}, "degraded": {}}

    def test_each_rank_has_its_own_prefix(self, router: RouterUnderTest, publisher: EventPublisher) -> None:
        with event_publisher() as second:
            for rank, each in enumerate((publisher, second)):
                pack(router, "/register", {**self.registration, **each.fields, "dp_rank": rank})
            publisher.publish(make_event(range(16), [1]))
            second.publish(make_event(range(32), [1, 2]))

            dp = {"0": 16, "1": 32}

            def are_known() -> bool:
                second.answer_replays()
                found = self.ask_for(router, publisher, range(32))["instances"].get("engine-a", {})
                return bool(found == {**entry(32), "dp": dp, "rank_matches": found.get("rank_matches")})

            wait_until(are_known, "both ranks")
        removed = pack(router, "/unregister", {"instance_id": "engine-a"})["removed_instances"]
        assert removed == ["engine-a|default|0", "engine-a|default|1"]

    @pytest.mark.parametrize(
        ("changes", "answers"),
        [
            ({"tenant_id": "other"}, False),
            ({"model": "other"}, False),
            ({"block_size": 32}, False),
            ({"instance_id": "engine-b"}, False),
            ({"cache_salt": None, "lora_name": "", "tenant_id": ""}, True),
        ],
    )
    def test_a_query_is_for_one_tenant_model_and_block_size(
        self, router: RouterUnderTest, publisher: EventPublisher, changes: dict[str, Any], answers: bool
    ) -> None:
        pack(router, "/register", {**self.registration, **publisher.fields})
        wait_until(lambda: bool(self.ask_for(router, publisher, [])["instances"]), "the publisher")
        question = {"model": "test-model", "block_size": SIZE, "token_ids": [1, 2], "instance_id": "engine-a"}
        assert bool(pack(router, "/query", {**question, **changes})["instances"]) is answers


class TestRfc:
    """The documents of RFC 1403: JSON, hashes of sequences, ``additionalsalt``."""

    def test_its_examples_are_answered(self, router: RouterUnderTest, publisher: EventPublisher) -> None:
        registration = {
            "type": "vLLM",
            "modelname": "deepseek",
            "lora_name": "sql-adapter",
            "tenant_id": "default",
            "instance_id": "vllm-prefill-node1",
            "block_size": SIZE,
            "dp_rank": 0,
            "additionalsalt": "w8a8",
            **publisher.fields,
        }
        assert router.client.post("/register", json=registration).status_code == 200
        publisher.publish(make_event(range(32), [1234567890, 9876543210]))
        question: dict[str, Any] = {
            "model": "deepseek",
            "lora_name": "sql-adapter",
            "tenant_id": "default",
            "instance_id": "vllm-prefill-node1",
            "block_size": SIZE,
            "cache_salt": "w8a8",
        }
        by_hash = {**question, "seq_hashes": [1234567890, 9876543210, 1]}
        by_draft = {**question, "block_hash": [1234567890]}
        for path, asked, tokens in (
            ("/query", {**question, "token_ids": list(range(48))}, 32),
            ("/query_by_hash", by_hash, 32),
            ("/query_by_hash", by_draft, 16),
        ):
            wait_for_match(router, publisher, tokens, "vllm-prefill-node1", path=path, **asked)
        for path, asked in (
            ("/query", {"token_ids": list(range(48))}),
            ("/query_by_hash", {"seq_hashes": [1234567890]}),
        ):
            assert ask(router, path, **{**question, **asked, "cache_salt": "fp16"})["instances"] == {}

    def test_hashes_that_it_recommends_are_found(self, router: RouterUnderTest, publisher: EventPublisher) -> None:
        """``seq_hash[i] = XXH3(seq_hash[i-1]_le || local_block_hash[i]_le, S)``; S is Dynamo's 1337."""
        register(router, publisher)
        publisher.publish(make_event(range(48), [5, 6, 7]))
        local = [xxhash.xxh3_64_intdigest(struct.pack("<16I", *range(at, at + 16)), 1337) for at in (0, 16, 32)]
        names = itertools.accumulate(
            local, lambda name, content: xxhash.xxh3_64_intdigest(struct.pack("<QQ", name, content), 1337)
        )
        wait_for_match(router, publisher, 48, path="/query_by_hash", seq_hashes=[*names, 1])


class TestDynamo:
    """Dynamo's indexer: JSON, ``model_name``, numbers as ids, hashes of each block's own tokens."""

    def test_its_examples_are_answered(self, router: RouterUnderTest, publisher: EventPublisher) -> None:
        assert register(router, publisher).status_code == 200
        publisher.publish(make_event(range(1, 17), [-5]))
        tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
        assert wait_for_match(router, publisher, 16, token_ids=tokens) == entry(16)
        content = xxhash.xxh3_64_intdigest(struct.pack("<16I", *tokens), 1337)
        signed = content - 2**64 if content >> 63 else content  # Dynamo has a list of i64
        for hashes in ([signed], [content], [-5], [2**64 - 5]):
            found = ask(router, "/query_by_hash", block_hashes=hashes)
            assert found["instances"]["1"]["gpu"] == 16, hashes
        gone = router.client.post("/unregister", json={"instance_id": 1, "model_name": MODEL, "dp_rank": 0})
        assert (gone.status_code, gone.json()["removed_instances"]) == (200, ["1|default|0"])

    def test_hashes_depend_on_lora_adapters_and_salts_as_in_dynamo(
        self, router: RouterUnderTest, publisher: EventPublisher
    ) -> None:
        """``compute_salt_hash`` in ``lib/kv-hashing``; vLLM names a salt in the first block's ``extra_keys``."""
        register(router, publisher)
        publisher.publish(
            make_event(range(16), [1], lora_name="sql", extra_keys=[["sql", "tenant-a"]]),
            make_event(range(16, 32), [2], parent=1, lora_name="sql", extra_keys=[["sql"]]),
        )
        prompt: dict[str, Any] = {"token_ids": list(range(32))}
        wait_for_match(router, publisher, 32, lora_name="sql", cache_salt="tenant-a", **prompt)
        others: list[dict[str, str]] = [{}, {"lora_name": "sql"}, {"cache_salt": "tenant-a"}]
        others += [{"lora_name": "tenant-a", "cache_salt": "sql"}, {"lora_name": "sql", "cache_salt": "tenant-b"}]
        assert [ask(router, **prompt, **each)["instances"]["1"]["gpu"] for each in others] == [0] * 5
        seed = 1337 + xxhash.xxh3_64_intdigest(b"sql") + xxhash.xxh3_64_intdigest(b"tenant-a", 1)
        local = [xxhash.xxh3_64_intdigest(struct.pack("<16I", *range(at, at + 16)), seed % 2**64) for at in (0, 16)]
        assert ask(router, "/query_by_hash", block_hashes=local)["instances"]["1"]["gpu"] == 32

    def test_its_routing_group_is_a_tenant(self, router: RouterUnderTest, publisher: EventPublisher) -> None:
        register(router, publisher, routing_group="customer-a")
        wait_for_match(router, publisher, 0, token_ids=[], routing_group="customer-a")
        assert ask(router, token_ids=[])["instances"] == {}


def test_an_instance_that_publishes_is_in_the_index_with_its_address(
    make_router: MakeRouter, stand_in: MakeStandIn, publisher: EventPublisher
) -> None:
    instance = stand_in()
    instance.extra_fields["kv_events"] = publisher.fields
    router = make_router(instance, kv_events=True, model_alias=["chat=m"])
    publisher.publish(make_event(range(32), [1, 2]))
    for model in ("m", "chat", "default"):
        wait_for_match(router, publisher, 32, instance.key, model_name=model, token_ids=list(range(40)))
    assert ask(router, token_ids=[], tenant_id="other")["instances"] == {}
    refused = register(router, publisher, instance_id=instance.key)
    message = f"instance_id is {instance.key!r}, the address of an instance that is registered at this router"
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(message)


def test_a_removed_block_ends_the_prefix(router: RouterUnderTest, publisher: EventPublisher) -> None:
    register(router, publisher)
    publisher.publish(make_event(range(48), [1, 2, 3]))
    prompt: dict[str, Any] = {"token_ids": list(range(48))}
    wait_for_match(router, publisher, 48, **prompt)
    publisher.publish(BlockRemoved([2]))
    wait_for_match(router, publisher, 16, **prompt)
    assert ask(router, "/query_by_hash", seq_hashes=[1, 2, 3])["instances"]["1"]["gpu"] == 16
    publisher.publish(make_event(range(16, 32), [2], parent=1))
    wait_for_match(router, publisher, 48, **prompt)
    publisher.publish(AllBlocksCleared())
    wait_for_match(router, publisher, 0, **prompt)


def test_a_degraded_instance_is_in_a_separate_list(router: RouterUnderTest, publisher: EventPublisher) -> None:
    publisher.publish(make_event(range(16), [1]))
    del publisher.sent[0]
    register(router, publisher)
    publisher.publish(make_event(range(16, 32), [2], parent=1))
    publisher.publish(make_event(range(100, 116), [3]))
    prompt: dict[str, Any] = {"token_ids": list(range(100, 116))}

    def is_known() -> bool:
        publisher.answer_replays()
        return bool(ask(router, **prompt)["degraded"] == {"1": entry(16)})

    wait_until(is_known, "the known part")
    assert ask(router, **prompt)["instances"] == {}


@pytest.mark.parametrize(
    ("members", "tokens"),
    [
        ({"extra_keys": [["an-image-and-its-place", 3], None]}, 0),
        ({"extra_keys": [None, [["an-image", 0]]]}, 16),
        ({"extra_keys": [None, 7]}, 16),
    ],
)
def test_blocks_that_tokens_do_not_identify_are_found_by_hash_only(
    router: RouterUnderTest, publisher: EventPublisher, members: dict[str, Any], tokens: int
) -> None:
    register(router, publisher)
    publisher.publish(make_event(range(32), [1, 2], **members))
    wait_for_match(router, publisher, 32, path="/query_by_hash", seq_hashes=[1, 2])
    assert ask(router, token_ids=list(range(32)))["instances"]["1"]["gpu"] == tokens


@pytest.mark.parametrize("tokens", [[], range(8), [2**32, *range(31)], [-1, *range(31)]])
def test_blocks_without_valid_tokens_are_found_by_hash_only(
    router: RouterUnderTest, publisher: EventPublisher, tokens: Sequence[int]
) -> None:
    register(router, publisher)
    publisher.publish(make_event(tokens, [1, 2]))
    wait_for_match(router, publisher, 32, path="/query_by_hash", seq_hashes=[1, 2])
    assert ask(router, token_ids=list(range(32)))["instances"]["1"]["gpu"] == 0


def test_hashes_of_32_bytes_are_sent_in_hexadecimal_form(router: RouterUnderTest, publisher: EventPublisher) -> None:
    """vLLM publishes such hashes with ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``."""
    register(router, publisher)
    publisher.publish(BlockStored([b"\x07" * 32], None, [], SIZE))
    wait_for_match(router, publisher, 16, path="/query_by_hash", block_hash=["07" * 32])
    publisher.publish(make_event(range(16), [5]))
    wait_for_match(router, publisher, 16, path="/query_by_hash", block_hash=[5])
    assert ask(router, "/query_by_hash", block_hash=["08" * 32, 5])["instances"]["1"]["gpu"] == 0


def test_workers_know_the_same_publishers(make_router: MakeRouter, publisher: EventPublisher) -> None:
    first, second = make_router(kv_events=True, workers=2).workers
    assert register(first, publisher).status_code == 200
    assert list(publishers_of(second)) == ["1|default|0"]
    publisher.publish(make_event(range(16), [1]))
    for worker in (first, second):
        wait_for_match(worker, publisher, 16, token_ids=list(range(16)))
    assert register(second, publisher, block_size=32).status_code == 400
    publishers_of(first).clear()  # as in a new worker that replaces another
    first.thread.run(first.app.learn_publishers())
    assert list(publishers_of(first)) == ["1|default|0"]
    assert second.client.post("/unregister", json={"instance_id": 1}).status_code == 200
    assert publishers_of(first) == {}


def test_a_router_without_an_index_names_the_flag_for_it(make_router: MakeRouter, publisher: EventPublisher) -> None:
    router = make_router()
    for response in (register(router, publisher), router.client.post("/query", json={})):
        assert response.status_code == 404
        assert "start it with --kv-events" in response.json()["error"]["message"]


def test_a_registration_with_a_host_is_an_instance_not_a_publisher(
    make_router: MakeRouter, stand_in: MakeStandIn, publisher: EventPublisher
) -> None:
    router, instance = make_router(kv_events=True), stand_in()
    fields = {"instance_id": 1, "model_name": MODEL, "block_size": SIZE, **publisher.fields}
    assert instance.register(router.url, **fields).json() == {"status": "success"}
    assert [each.key for each in router.app.registry] == [instance.key]
    assert publishers_of(router) == {}


def test_a_query_requires_the_token_for_registrations(make_router: MakeRouter, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-of-instances")
    (tmp_path / "keys").write_text("client: secret-of-client")
    router = make_router(
        kv_events=True, register_token_file=str(tmp_path / "token"), api_keys_file=str(tmp_path / "keys")
    )
    for path in ("/register", "/unregister", "/query", "/query_by_hash"):
        for secret, status in (("", 401), ("secret-of-client", 401), ("secret-of-instances", 400)):
            headers = {"Authorization": f"Bearer {secret}"} if secret else {}
            assert router.client.post(path, json={"endpoint": 1}, headers=headers).status_code == status, (path, secret)


GOOD = {"instance_id": "a", "model": "m", "block_size": 16, "endpoint": "tcp://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("path", "members", "message"),
    [
        ("/register", {"endpoint": "http://127.0.0.1:9"}, "endpoint is 'http://127.0.0.1:9'; it must be an address"),
        ("/register", {"endpoint": "ipc:///run/secret"}, "endpoint is 'ipc:///run/secret'; it must be an address"),
        ("/register", {"endpoint": "tcp://*:5557"}, "endpoint is 'tcp://*:5557'; it must be an address"),
        ("/register", {"endpoint": "tcp://a:99999"}, "endpoint is 'tcp://a:99999'; it must be an address"),
        ("/register", {"endpoint": "tcp://-a:1"}, "endpoint is 'tcp://-a:1'; it must be an address"),
        ("/register", {"endpoint": None}, "endpoint is missing"),
        ("/register", {"replay_endpoint": 5}, "replay_endpoint is 5; it must be a text"),
        ("/register", {"type": "Mooncake"}, "type is 'Mooncake'; it must be 'vLLM' or 'SGLang'; the router reads"),
        ("/register", {"type": ["vLLM"]}, "type is a list; it must be 'vLLM' or 'SGLang'"),
        ("/register", {"block_size": 0}, "block_size is 0; it must be a whole number from 1 to 65536"),
        ("/register", {"block_size": True}, "block_size is True; it must be a whole number"),
        ("/register", {"dp_rank": -1}, "dp_rank is -1; it must be a whole number from 0"),
        ("/register", {"model": None}, "modelname is missing"),
        ("/register", {"model": "x" * 300}, "model is 'xxx"),
        ("/register", {"instance_id": None}, "instance_id is missing"),
        ("/register", {"instance_id": -1}, "instance_id is -1; it must be a text"),
        ("/register", {"instance_id": "a\nb"}, "instance_id is 'a\\nb'; it must be a text"),
        ("/unregister", {"dp_rank": 1.5}, "dp_rank is 1.5; it must be a whole number"),
        ("/query", {}, "token_ids must be a list of whole numbers"),
        ("/query", {"token_ids": "1,2"}, "token_ids must be a list of whole numbers"),
        ("/query", {"token_ids": [1, 2.5]}, "token_ids must have only whole numbers"),
        ("/query", {"token_ids": [1, [2]]}, "token_ids must have only whole numbers"),
        ("/query", {"token_ids": [-1]}, "token_ids must have only whole numbers"),
        ("/query", {"model": 5, "token_ids": []}, "model is 5; it must be a text"),
        ("/query", {"lora_id": 12, "token_ids": []}, "lora_id is not supported; send the adapter's lora_name"),
        ("/query_by_hash", {}, "seq_hashes must be a list of hashes"),
        ("/query_by_hash", {"block_hashes": {}}, "block_hashes must be a list of hashes"),
        ("/query_by_hash", {"seq_hashes": ["xyz"]}, "seq_hashes has 'xyz'; a hash is a number of 64 bits"),
        ("/query_by_hash", {"seq_hashes": [[1]]}, "seq_hashes has a list; a hash is"),
        ("/query_by_hash", {"seq_hashes": [True]}, "seq_hashes has True; a hash is"),
        ("/query_by_hash", {"seq_hashes": [1.5]}, "seq_hashes has 1.5; a hash is"),
    ],
)
def test_the_error_for_a_wrong_member_is_one_sentence_with_its_name(
    router: RouterUnderTest, path: str, members: dict[str, Any], message: str
) -> None:
    for content_type, encode in (("application/json", orjson.dumps), ("application/msgpack", msgpack.packb)):
        fields = {**GOOD, **members}
        response = router.client.post(path, headers={"Content-Type": content_type}, content=encode(fields))
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa1a", b"\x91" * 100_000, b"\x81\xc4\x01a\x01"]
)
def test_a_body_that_is_not_a_map_is_a_400(router: RouterUnderTest, body: bytes) -> None:
    response = router.client.post("/query", content=body, headers={"Content-Type": "application/msgpack"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_body"


def test_a_body_with_many_arrays_is_refused(router: RouterUnderTest) -> None:
    inner: Any
    for inner in ([], {}, [[]]):
        content = msgpack.packb({"model": "m", "token_ids": [inner] * 100_000})
        response = router.client.post("/query", content=content, headers={"Content-Type": "application/msgpack"})
        assert (response.status_code, response.json()["error"]["message"]) == (
            400,
            "the body has too many arrays and maps; at most 64 are allowed",
        )


def test_an_unknown_publisher_is_a_404(router: RouterUnderTest) -> None:
    response = router.client.post("/unregister", json={"instance_id": "engine-a", "dp_rank": 3})
    message = "there is no publisher of rank 3 for instance 'engine-a' of tenant 'default'"
    assert (response.status_code, response.json()["error"]["message"]) == (404, message)


def test_an_address_and_a_rank_are_registered_once(router: RouterUnderTest, publisher: EventPublisher) -> None:
    assert register(router, publisher).status_code == 200
    other = register(router, publisher, instance_id=2)
    assert "has the endpoint 'tcp://" in other.json()["error"]["message"]
    changed = register(router, publisher, endpoint="tcp://127.0.0.1:9")
    message = "publisher '1|default|0' is registered with other values; unregister it first"
    assert (changed.status_code, changed.json()["error"]["message"]) == (400, message)


def test_the_number_of_publishers_is_limited(router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_index, "MAX_PUBLISHERS", 2)
    statuses = [
        router.client.post("/register", json={**GOOD, "dp_rank": rank, "endpoint": f"tcp://127.0.0.1:{9 + rank}"})
        for rank in range(3)
    ]
    assert [each.status_code for each in statuses] == [200, 200, 429]


def test_the_largest_publisher_is_removed_if_there_are_too_many_blocks(
    router: RouterUnderTest,
    publisher: EventPublisher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    register(router, publisher)
    wait_for_match(router, publisher, 0, token_ids=[])
    monkeypatch.setattr(kv_events, "MAX_PUBLISHED_BLOCKS", 100)
    publisher.store(*range(101))
    wait_until(lambda: not publishers_of(router), "the removal")
    assert "publisher 1|default|0, which has the most blocks, is unregistered: all publishers" in caplog.text
    assert ask(router, token_ids=[])["instances"] == {}
