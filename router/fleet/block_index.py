"""BlockIndex: responds to queries of other schedulers about which instance has cached which prefix of a prompt.

The protocol is RFC 1403 of Mooncake, as in its conductor (``docs/source/design/conductor/indexer-api-design.md`` of the
branch ``dev/conductor``). The requests of Dynamo's indexer (``docs/components/router/``) are accepted, too. ``/query``
asks by token ids, ``/query_by_hash`` by hashes of blocks. ``/register`` adds a publisher of KV events to the index, and
``/unregister`` removes it. Instances of this router that publish KV events are always in the index.

In a response, ``instances`` lists the caches that are known exactly, and ``degraded`` lists the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import count, islice
from typing import Any, NamedTuple

import msgpack
import orjson

from router.fleet.kv_event_feed import Publisher
from router.fleet.kv_events import KvEventReader
from router.fleet.models import ServedModels
from router.fleet.registration import ENDPOINT
from router.fleet.registry import Registry
from router.http import ApiError, BadBody, Refused, parse_object
from router.policies import TOKEN_BYTES, BlockHash, CachedBlocks, chain_names, iterate_names, pack_tokens, seed_of

__all__ = ["BlockIndex", "is_publisher", "read_fields", "write_answer"]

# Media type of msgpack, which the conductor uses. Dynamo uses JSON.
_PACKED = "application/msgpack"

# Maximum number of arrays and maps in a body. A million of them take half a second to parse.
_MAX_CONTAINERS = 64
# Limited, because a publisher needs three sockets in each process.
MAX_PUBLISHERS = 256
MAX_NAME = 256
# Number of runs of blocks whose names are computed before other work runs.
_RUNS_AT_ONCE = 16
MAX_BLOCK_SIZE = 65_536
_MAX_RANK = 2**31 - 1
MAX_BLOCKS = 65_536
"""Maximum number of blocks of a prompt that are looked up: a million tokens in blocks of 16."""
_DEFAULT_TENANT = "default"
_TYPES = ("vllm", "sglang")
_BITS = (1 << 64) - 1

_Fields = Mapping[str, Any]


def is_publisher(fields: _Fields) -> bool:
    """Return whether the body of ``/register`` describes a publisher for the index, not an instance of this router.

    An instance must send ``host_ip``, which a publisher does not have.
    """
    return "host_ip" not in fields and ("endpoint" in fields or "instance_id" in fields)


def read_fields(data: bytes, content_type: str) -> dict[str, Any]:
    """Parse a body, which is JSON or msgpack according to its content type.

    Raises:
        BadBody: the body is not a JSON object or a map in msgpack.
    """
    if not _is_packed(content_type):
        return parse_object(data)
    numbers = count()

    def check_container(container: Any) -> Any:
        if next(numbers) >= _MAX_CONTAINERS:
            raise BadBody(f"the body has too many arrays and maps; at most {_MAX_CONTAINERS} are allowed")
        return container

    try:
        fields = msgpack.unpackb(data, list_hook=check_container, object_hook=check_container)
    except BadBody:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise BadBody("the Content-Type is msgpack, but the body is not valid msgpack") from None
    if not isinstance(fields, dict):
        raise BadBody("the Content-Type is msgpack, so the body must be a map in msgpack")
    return fields


def write_answer(answer: _Fields, content_type: str) -> tuple[bytes, str]:
    """Encode a response as msgpack if the query was msgpack, else as JSON. Return the bytes and the content type."""
    if _is_packed(content_type):
        return msgpack.packb(answer), _PACKED
    return orjson.dumps(answer), "application/json"


def _is_packed(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() in (_PACKED, "application/x-msgpack")


class _Question(NamedTuple):
    """The members of a query that select caches, for queries by token ids and for queries by hashes."""

    model: str
    tenant: str
    lora_name: str
    salt: str
    block_size: int
    """Number of tokens in a block; 0: the query selects caches with any block size."""
    instance_id: str
    """The instance to search; ``""``: all instances."""


class _Source(NamedTuple):
    """A cache to search: the own cache of an instance, or the cache of one data-parallel rank of a publisher."""

    instance_id: str
    rank: int
    salt: str
    cache: CachedBlocks
    block_size: int


class _Names:
    """The names of a prompt's blocks: hashes of all tokens up to the block's end, computed only when they are used."""

    def __init__(self, tokens: bytes, block_size: int, seed: int) -> None:
        self._known: list[int] = []
        self._others = islice(iterate_names(tokens, block_size, seed), MAX_BLOCKS)

    def __iter__(self) -> Iterator[int]:
        yield from self._known
        for name in self._others:
            self._known.append(name)
            yield name


class BlockIndex:
    """Responds to queries about the caches of all instances and publishers whose KV events are read."""

    def __init__(
        self,
        registry: Registry,
        reader: KvEventReader,
        aliases: Mapping[str, str],
        send_changes: Callable[[Any], Awaitable[None]],
    ) -> None:
        """
        Args:
            registry: the instances.
            reader: reads the events of instances and publishers.
            aliases: for each alias of a model, the name of the model.
            send_changes: sends changes to the other processes, which pass them to ``on_changes``. Returns when these
                processes have received the changes.
        """
        self._registry = registry
        self._reader = reader
        self._aliases = aliases
        self._send_changes = send_changes

    def __repr__(self) -> str:
        return f"<BlockIndex {len(self._reader.publishers)} publishers>"

    async def register(self, fields: _Fields) -> dict[str, Any]:
        """Add a publisher to the index, and begin to read its events.

        Raises:
            BadBody: a member is missing or invalid, or the publisher is registered with other values.
            Refused: there are too many publishers.
        """
        publisher, known = _read_publisher(fields), self._reader.publishers
        same = known.get(publisher.key)
        if same is not None and same != publisher:
            raise BadBody(f"publisher {publisher.key!r} is registered with other values; unregister it first")
        if same is None:
            if self._registry.get(publisher.instance_id) is not None:
                message = (
                    f"instance_id is {publisher.instance_id!r}, the address of an instance that is registered at this "
                    "router; if it publishes KV events, the index has them already"
                )
                raise BadBody(message, "instance_id")
            endpoint = publisher.kv_events["endpoint"]
            for other in known.values():
                if other.kv_events["endpoint"] == endpoint:
                    message = f"publisher {other.key!r} has the endpoint {endpoint!r} already; unregister it first"
                    raise BadBody(message, "endpoint")
            if len(known) >= MAX_PUBLISHERS:
                message = f"{MAX_PUBLISHERS} publishers are registered, which is the maximum of this router"
                raise Refused(ApiError(429, message, "too_many_publishers"))
            self._reader.update_publishers([publisher])
        await self._send_changes([[_dump(publisher)], []])
        return {"status": "registered successfully", "instance_id": fields["instance_id"]}

    async def unregister(self, fields: _Fields) -> dict[str, Any]:
        """Remove a publisher from the index; without ``dp_rank``, all publishers of an instance.

        Raises:
            BadBody: a member is missing or invalid.
            Refused: there is no such publisher.
        """
        instance_id, tenant = _read_id(fields), _read_tenant(fields)
        rank = None if fields.get("dp_rank") is None else _read_number(fields, "dp_rank", 0, _MAX_RANK)
        keys = [
            key
            for key, each in self._reader.publishers.items()
            if (each.instance_id, each.tenant) == (instance_id, tenant) and rank in (None, each.rank)
        ]
        if not keys:
            which = "" if rank is None else f" of rank {rank}"
            message = f"there is no publisher{which} for instance {instance_id!r} of tenant {tenant!r}"
            raise Refused(ApiError(404, message, "unknown_publisher"))
        self._reader.update_publishers([], keys)
        await self._send_changes([[], keys])
        return {"status": "unregistered successfully", "removed_instances": keys}

    async def query(self, fields: _Fields) -> dict[str, Any]:
        """Return how many leading tokens of a prompt each instance has cached. The query contains the token ids.

        Raises:
            BadBody: a member is missing or invalid.
        """
        question, tokens = _read_question(fields), _read_tokens(fields)
        named: dict[tuple[int, str], _Names] = {}

        def count_blocks(source: _Source) -> int:
            size, salt = source.cache.block_size, "" if source.salt else question.salt
            if (size, salt) not in named:
                named[size, salt] = _Names(tokens, size, seed_of(question.lora_name, salt))
            return source.cache.count_named(named[size, salt])

        return await self._answer(question, count_blocks, lambda source: source.salt in ("", question.salt))

    async def query_by_hash(self, fields: _Fields) -> dict[str, Any]:
        """Return how many leading tokens of a prompt each instance has cached. The query contains hashes of blocks.

        A client may send three kinds of hashes, and each kind is tried: the hashes in the instance's KV events, this
        router's names of blocks (``block_names``), and hashes of single blocks, without the tokens before, as in
        Dynamo. All depend on the LoRA adapter and the salt.

        Raises:
            BadBody: a member is missing or invalid.
        """
        question, hashes = _read_question(fields), _read_hashes(fields)
        numbers = [each for each in hashes if isinstance(each, int)]
        if len(numbers) < len(hashes):
            numbers = []
        names = list(chain_names(each & _BITS for each in numbers))
        # One program may write a hash as a signed number, and another one as an unsigned number.
        turned = [each - 2**64 if each >> 63 > 0 else each & _BITS for each in numbers]

        def count_blocks(source: _Source) -> int:
            cache = source.cache
            return max(cache.count_leading(hashes), cache.count_leading(turned), cache.count_named(names))

        return await self._answer(question, count_blocks, lambda source: source.salt == question.salt)

    def dump(self) -> list[Any]:
        """Return all publishers as changes, which a process that starts later passes to its ``on_changes``."""
        return [[_dump(each) for each in self._reader.publishers.values()], []]

    def on_changes(self, changes: Any) -> None:
        """Apply changes that another process has sent."""
        added, removed = changes
        known = self._reader.publishers
        publishers = [Publisher(**each) for each in added]
        self._reader.update_publishers([each for each in publishers if known.get(each.key) != each], removed)

    async def _answer(
        self, question: _Question, count_blocks: Callable[[_Source], int], is_asked: Callable[[_Source], bool]
    ) -> dict[str, Any]:
        """Return the response to a query.

        Args:
            question: selects caches by model, tenant, block size and instance.
            count_blocks: returns the number of leading blocks that a cache has.
            is_asked: returns whether the salt of the query selects a cache.
        """
        matches: dict[bool, dict[str, dict[str, int]]] = {True: {}, False: {}}
        for source in self._list_sources(question):
            if is_asked(source):
                for number, _ in enumerate(source.cache.name_blocks()):
                    if number % _RUNS_AT_ONCE == 0:
                        await asyncio.sleep(0)
                size = source.cache.block_size
                tokens = count_blocks(source) * size if size else 0
                matches[source.cache.is_exact].setdefault(source.instance_id, {})[str(source.rank)] = tokens
                await asyncio.sleep(0)
        instances, degraded = (
            {instance_id: _describe_match(ranks) for instance_id, ranks in matches[is_exact].items()}
            for is_exact in (True, False)
        )
        return {"instances": instances, "degraded": degraded}

    def _list_sources(self, question: _Question) -> list[_Source]:
        """Return the caches that a query selects by its members other than the salt."""
        sources = []
        for source in (*self._list_published(question), *self._list_instances(question)):
            size = source.cache.block_size or source.block_size
            if question.instance_id in ("", source.instance_id) and (
                not size or not question.block_size or size == question.block_size
            ):
                sources.append(source)
        return sources

    def _list_published(self, question: _Question) -> Iterator[_Source]:
        for key, publisher in self._reader.publishers.items():
            cache = self._reader.find_cache(key)
            if cache is None or (publisher.tenant, publisher.model) != (question.tenant, question.model):
                continue
            if self._registry.get(publisher.instance_id) is None:  # otherwise only the instance's own events count
                yield _Source(publisher.instance_id, publisher.rank, publisher.salt, cache, publisher.block_size)

    def _list_instances(self, question: _Question) -> Iterator[_Source]:
        if question.tenant != _DEFAULT_TENANT:
            return
        model = ServedModels(self._registry, self._registry.gone_models).find(
            self._aliases.get(question.model, question.model)
        )
        for instance in self._registry:
            cache = self._reader.find_cache(instance.key)
            if cache is not None and _serves(instance.models, model):
                yield _Source(instance.key, 0, "", cache, 0)


def _serves(models: frozenset[str] | None, model: str | None) -> bool:
    """Return whether an instance that lists ``models`` serves ``model``, which is a result of ``ServedModels.find``."""
    if not model:
        return model == ""
    return models is not None and (not models or model in models)


def _describe_match(ranks: dict[str, int]) -> dict[str, Any]:
    """Return the entry of an instance in a response, from the number of cached tokens of each rank.

    The response has one number for each medium (GPU, CPU, disk), which also counts the tokens on faster media. All
    three are equal, because the router knows only the caches in the instances' memory.
    """
    most = max(ranks.values())
    rank_matches = {rank: {"gpu": tokens, "cpu": tokens, "disk": tokens} for rank, tokens in ranks.items()}
    return {"longest_matched": most, "gpu": most, "dp": ranks, "cpu": most, "disk": most, "rank_matches": rank_matches}


def _dump(publisher: Publisher) -> dict[str, Any]:
    return {name: value for name, value in asdict(publisher).items() if name != "cache_known"}


def _read_publisher(fields: _Fields) -> Publisher:
    kind = fields.get("type", "vLLM")
    if str(kind).lower() not in _TYPES:
        why = "; the router reads events of instances, not of the pool" if str(kind).lower() == "mooncake" else ""
        raise BadBody(f"type is {_show(kind)}; it must be 'vLLM' or 'SGLang'{why}", "type")
    kv_events = {"endpoint": _read_endpoint(fields, "endpoint")}
    if fields.get("replay_endpoint"):
        kv_events["replay_endpoint"] = _read_endpoint(fields, "replay_endpoint")
    return Publisher(
        instance_id=_read_id(fields),
        tenant=_read_tenant(fields),
        rank=0 if fields.get("dp_rank") is None else _read_number(fields, "dp_rank", 0, _MAX_RANK),
        model=_read_text(fields, "modelname", "model_name", "model"),
        block_size=_read_number(fields, "block_size", 1, MAX_BLOCK_SIZE),
        lora_name=_read_text(fields, "lora_name", default=""),
        salt=_read_text(fields, "additionalsalt", "additional_salt", default=""),
        kv_events=kv_events,
    )


def _read_question(fields: _Fields) -> _Question:
    if fields.get("lora_id") not in (None, -1, 0):
        raise BadBody("lora_id is not supported; send the adapter's lora_name", "lora_id")
    size = fields.get("block_size")
    return _Question(
        model=_read_text(fields, "model", "model_name"),
        tenant=_read_tenant(fields),
        lora_name=_read_text(fields, "lora_name", default=""),
        salt=_read_text(fields, "cache_salt", default=""),
        block_size=0 if size is None else _read_number(fields, "block_size", 1, MAX_BLOCK_SIZE),
        instance_id="" if fields.get("instance_id") is None else _read_id(fields),
    )


def _read_tokens(fields: _Fields) -> bytes:
    tokens = fields.get("token_ids")
    if isinstance(tokens, bytes):  # msgpack: little-endian, 32 bits each
        if len(tokens) % TOKEN_BYTES:
            raise BadBody(f"token_ids has {len(tokens)} bytes; each token has {TOKEN_BYTES}", "token_ids")
        return tokens
    if not isinstance(tokens, list):
        raise BadBody("token_ids must be a list of whole numbers", "token_ids")
    try:
        return pack_tokens(tokens)
    except (OverflowError, TypeError):
        raise BadBody("token_ids must have only whole numbers from 0 to 4294967295", "token_ids") from None


def _read_hashes(fields: _Fields) -> list[BlockHash]:
    name = next((name for name in ("seq_hashes", "block_hashes", "block_hash") if name in fields), "seq_hashes")
    hashes = fields.get(name)
    if not isinstance(hashes, list):
        raise BadBody(f"{name} must be a list of hashes", name)
    return [_read_hash(each, name) for each in hashes[:MAX_BLOCKS]]


def _read_hash(value: Any, name: str) -> BlockHash:
    if type(value) is bytes or (type(value) is int and -(1 << 63) <= value <= _BITS):
        return value
    try:
        return bytes.fromhex(value)
    except (ValueError, TypeError):
        message = f"{name} has {_show(value)}; a hash is a number of 64 bits, or bytes in hexadecimal form"
        raise BadBody(message, name) from None


def _read_tenant(fields: _Fields) -> str:
    return _read_text(fields, "routing_group", "tenant_id", default=_DEFAULT_TENANT)


def _read_id(fields: _Fields) -> str:
    value = fields.get("instance_id")
    if type(value) is int and value >= 0:  # as Dynamo sends it
        return str(value)
    return _read_text(fields, "instance_id")


def _read_endpoint(fields: _Fields, name: str) -> str:
    endpoint = _read_text(fields, name)
    port = endpoint.rpartition(":")[2]
    if not endpoint.startswith("tcp://") or not ENDPOINT.fullmatch(endpoint) or not 0 < int(port) < 65536:
        raise BadBody(f"{name} is {_show(endpoint)}; it must be an address such as 'tcp://10.0.0.7:5557'", name)
    return endpoint


def _read_text(fields: _Fields, *names: str, default: str | None = None) -> str:
    """Return the text of the first member in ``names`` that is sent; ``default`` if all are missing, null or empty."""
    for name in names:
        value = fields.get(name)
        if value in (None, ""):
            continue
        if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
            raise BadBody(f"{name} is {_show(value)}; it must be a text of at most {MAX_NAME} characters", name)
        return value
    if default is None:
        raise BadBody(f"{names[0]} is missing", names[0])
    return default


def _read_number(fields: _Fields, name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= most:
        raise BadBody(f"{name} is {_show(value)}; it must be a whole number from {least} to {most}", name)
    return value


def _show(value: Any) -> str:
    """Return a value of a body as text for a message, shortened if it is long."""
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
