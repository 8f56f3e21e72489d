"""Models with several KV cache groups: vLLM's own scheduler and cache manager, our connector, and a simulated model.

The model writes known values to each block of a group. Before it computes a token, it compares all values that the
token's layers read. So a wrong, missing or partly loaded block fails the test.
"""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvstore_backend import Namespace
from kvstore_backend.backend import StorageBackend
from kvstore_backend.groups import Group
from kvstore_backend.integrations.vllm.memory import GroupedMemory, KVMemory
from kvstore_backend.integrations.vllm.route import Route, open_route
from kvstore_backend.integrations.vllm.worker import WorkerHalf
from kvstore_backend.pool import BlockPool
from kvstore_backend.stores.memory import MemoryStore
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.kvstore_backend.test_namespace import checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_BLOCKS = 160
WORDS = 8  # int64 numbers of a token in each layer


def full(size: int) -> Any:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=WORDS // 2, dtype=torch.int64)


def window(size: int, span: int) -> Any:
    return SlidingWindowSpec(
        block_size=size, num_kv_heads=1, head_size=WORDS // 2, dtype=torch.int64, sliding_window=span
    )


def chunk(size: int, span: int) -> Any:
    return ChunkedLocalAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=WORDS // 2, dtype=torch.int64, attention_chunk_size=span
    )


def state(size: int) -> Any:
    return MambaSpec(block_size=size, shapes=((size, WORDS),), dtypes=(torch.int64,), mamba_cache_mode="align")


MODELS = {
    "window": [full(16), window(16, 40)],
    "two windows": [full(16), window(16, 40), window(16, 40)],
    "window only": [window(16, 40)],
    "block sizes": [full(32), window(16, 56)],
    "chunk": [full(16), chunk(16, 64)],
    "state": [full(16), state(16)],
    "state and window": [full(16), state(16), window(16, 33)],
}
"""The specs of the groups of each model, by the model's name."""


def chain(tokens: Sequence[int]) -> torch.Tensor:
    """Return for each token a number that depends on it and on all tokens before it, int64 ``[token]``."""
    numbers, last = [], 1
    for token in tokens:
        last = zlib.crc32(token.to_bytes(4, "little"), last) | (last % 65521) << 32
        numbers.append(last)
    return torch.tensor(numbers)


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that the model generates after these."""
    return int(chain(tokens)[-1]) % 1000


class Instance:
    """A vLLM instance without a real model: its scheduler, our connector, and worker halves with KV memory.

    With two pipeline stages, each stage has one of the two layers of every group. ``retention`` is the value of vLLM's
    ``--prefix-cache-retention-interval``.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[Any],
        store: StorageBackend,
        tmp_path: Path,
        route: Route = "direct",
        num_stages: int = 1,
        retention: int = 0,
    ) -> None:
        groups = [
            KVCacheGroupSpec([f"l{number}.{part}" for part in range(2)], spec) for number, spec in enumerate(specs)
        ]
        transfer = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="kvstore_backend.integrations.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"pool": f"file://{tmp_path}/pool"},
        )
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_batched_tokens=96,
            max_num_seqs=4,
            block_size=min(spec.block_size for spec in specs),
            enable_prefix_caching=True,
            async_scheduling=False,
            prefix_cache_retention_interval=retention,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        register_all_kvcache_specs(config)
        sizes = [spec.page_size_bytes for spec in specs]
        assert len({spec.page_size_bytes // spec.block_size for spec in specs}) == 1
        page = max(sizes)
        # Groups share memory: layer ``part`` is in the same memory in every group.
        self.raw = torch.zeros(2, NUM_BLOCKS, page // 8, dtype=torch.int64)
        cache = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(self.raw.nbytes, [f"l{number}.{part}"], 0, page, part * NUM_BLOCKS * page)
                for number in range(len(specs))
                for part in range(2)
            ],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        )
        scheduler_size, hash_size = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hash_size
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.views = [
            [
                self.raw[part, :, : spec.block_size * WORDS].view(NUM_BLOCKS, 1, spec.block_size, WORDS)
                for part in range(2)
            ]
            for spec in specs
        ]
        layout = json.dumps([repr(spec) for spec in specs])[:200]
        self.workers = []
        for stage in range(num_stages):
            parts = range(stage, 2, num_stages)
            memory = GroupedMemory(
                [KVMemory({str(part): views[part] for part in parts}, NUM_BLOCKS) for views in self.views]
            )
            namespace = Namespace("m", "int64", scheduler_size, len(parts), 1, WORDS, f"{layout} stage {stage}")
            pool = BlockPool(store, namespace)
            self.workers.append(WorkerHalf(pool, memory, route=open_route(route, memory, pool)))
        self.worker = self.workers[0]
        self._aggregator = KVOutputAggregator(num_stages)
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=scheduler_size, hash_block_size=hash_size
        )
        self.connector: Any = self.scheduler.connector
        assert self.connector.role is KVConnectorRole.SCHEDULER
        self.connector.get_kv_connector_stats = lambda: None  # otherwise vLLM would take the counts
        self.half: Any = self.connector._scheduler
        self.half._backend.close()
        self.half._backend = store
        self.half._load_or_compute.decide = lambda *_: "load"
        self.half.learn_namespaces([worker.namespace for worker in self.workers])
        self.groups: Sequence[Group] = self.connector._groups
        self.specs = specs
        self.num_external = 0
        self.answers: dict[str, list[int]] = {}

    def ask(self, prompts: dict[str, list[int]], max_tokens: int = 20) -> dict[str, list[int]]:
        """Run some prompts at the same time, and return their generated tokens."""
        for name, prompt in prompts.items():
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
            self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self._hasher))
        self.answers = {name: [] for name in prompts}
        wait_until(self.step, "all answers", pause_s=0.001)
        return self.answers

    def step(self) -> bool:
        """Run one step of the engine; return whether all requests and transfers have ended."""
        planned = self.scheduler.schedule()
        plan = planned.kv_connector_metadata.plan
        for worker in self.workers:
            worker.start_loads(plan.loads)
        sampled = []
        for name, count in planned.num_scheduled_tokens.items():
            sampled.append(self.compute(name, count))
        names = list(planned.num_scheduled_tokens)
        results = []
        for worker in self.workers:
            worker.start_saves(plan.saves)
            loaded, report = worker.take_outcomes()
            assert not loaded.blocks or len(self.specs) == 1, "vLLM computes no single blocks"
            output = KVConnectorOutput(
                finished_recving=loaded.requests or None,
                failed_recving=loaded.failed,
                invalid_block_ids=loaded.blocks,
                kv_connector_worker_meta=None if report.is_empty else type(self).wrap(report),
            )
            results.append(
                ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled, kv_connector_output=output)
            )
        self.scheduler.update_from_output(planned, self._aggregator.aggregate(results, output_rank=len(results) - 1))
        return not self.scheduler.has_unfinished_requests() and not self.half.has_pins

    @staticmethod
    def wrap(report: Any) -> Any:
        from kvstore_backend.integrations.vllm import connector

        return connector._Report(report)

    def compute(self, name: str, count: int) -> list[int]:
        """Compute ``count`` tokens of a request, and check all values that they read."""
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        begin = end - count
        tokens = list(request.all_token_ids)
        numbers = chain(tokens)
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for number, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            size, group, ids = spec.block_size, self.groups[number], torch.tensor(table)
            for part, view in enumerate(self.views[number]):
                held = numbers + 1000 * number + part  # the values of this layer, one for each token
                if isinstance(spec, MambaSpec):
                    if begin:
                        assert (view[table[(begin - 1) // size]] == held[begin - 1]).all(), (name, number, begin)
                    view[table[(end - 1) // size]] = held[end - 1]
                    continue
                first = {"full": 0, "window": max(0, begin - group.span + 1)}.get(
                    group.kind, begin // group.span * group.span if group.span else 0
                )
                read = torch.arange(first, begin)
                assert ids[read // size].all(), (name, number, "the null block is read")
                assert (view[ids[read // size], 0, read % size] == held[read, None]).all(), (name, number, begin)
                new = torch.arange(begin, end)
                view[ids[new // size], 0, new % size] = held[new, None].expand(-1, WORDS)
        if end < request.num_tokens:
            return []
        answer = int(numbers[-1]) % 1000
        self.answers[name].append(answer)
        return [answer]

    def count_all(self) -> dict[str, float]:
        """Return all counts since the last call."""
        total: Counter[str] = Counter()
        for half in (self.half, *self.workers):
            for numbers in half.take_counts().values():
                total.update(numbers)
        return total  # type: ignore[return-value]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.half.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = checkpoint(tmp_path_factory.mktemp("model") / "m")
    (made / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 2048,
                "max_position_embeddings": 4096,
                "torch_dtype": "float32",
            }
        )
    )
    return made


class Pair:
    """Two instances of one model, and their store, from which tests remove blocks."""

    def __init__(
        self,
        folder: Path,
        name: str,
        tmp_path: Path,
        route: Route = "direct",
        num_stages: int = 1,
        retention: int = 0,
    ) -> None:
        self.memory = MemoryStore(64 << 20)
        self.store = CheckedBackend(self.memory)
        self.specs = MODELS[name]
        self.first, self.second = (
            Instance(folder, self.specs, self.store, tmp_path, route, num_stages, retention) for _ in range(2)
        )

    def list_keys(self) -> list[str]:
        return [key for key in self.memory._values if key.startswith("kv1-")]

    def close(self) -> None:
        self.first.close()
        self.second.close()


STAGED = ("window", "state and window")
"""Models that the tests run with two pipeline stages, too."""


@pytest.fixture(params=[*((name, 1) for name in MODELS), *((name, 2) for name in STAGED)], ids=str)
def pair(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Pair]:
    name, num_stages = request.param
    with contextlib.closing(Pair(folder, name, tmp_path, num_stages=num_stages)) as made:
        yield made


def make_prompts(count: int, seed: str) -> dict[str, list[int]]:
    """Return prompts of 20 to 400 tokens. Every second one continues an earlier one."""
    chooser = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        fresh = chooser.choices(range(1000), k=chooser.randrange(20, 200))
        prompts.append((chooser.choice(prompts) if number % 2 else []) + fresh)
    return {f"{seed}{number}": prompt for number, prompt in enumerate(prompts)}


def answer(prompt: list[int], max_tokens: int = 20) -> list[int]:
    """Return the tokens that the model generates without a cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def test_an_instance_loads_blocks_that_another_computed(pair: Pair) -> None:
    prompts = make_prompts(8, "a")
    expected = {name: answer(prompt) for name, prompt in prompts.items()}
    assert pair.first.ask(prompts) == expected
    assert pair.second.ask(prompts) == expected
    counts = pair.second.count_all()
    assert counts["load ok"] > 0
    assert not counts.get("load failed")
    if not any(isinstance(spec, MambaSpec) for spec in pair.specs):  # vLLM caches only few states
        assert not counts.get("lookup absent")


@pytest.mark.parametrize("name", ["state", "state and window"])
@pytest.mark.parametrize(("retention", "expected"), [(0, 0), (16, 192), (96, 192), (112, 0)])
def test_a_hit_of_a_common_prefix_ends_at_the_last_state_in_vllms_cache(
    folder: Path, tmp_path: Path, name: str, retention: int, expected: int
) -> None:
    """A step computes 96 tokens, so the chunks of a prompt end at 96 and 192 tokens."""
    prefix = list(range(230))
    with contextlib.closing(Pair(folder, name, tmp_path, retention=retention)) as pair:

        def count_hit(end: int) -> float:
            """Return the hit of the second instance in tokens, if the prompt's last 40 tokens are ``end``."""
            prompt = [*prefix, *[end] * 40]
            assert pair.second.scheduler.reset_prefix_cache()
            assert pair.second.ask({f"b{end}": prompt}) == {f"b{end}": answer(prompt)}
            return 16 * pair.second.count_all().get("lookup ok", 0)

        pair.first.ask({"a": [*prefix, *[1] * 40]})
        assert count_hit(1) == 256, "the last block boundary of the prompt"
        assert count_hit(2) == expected
        pair.first.ask({"c": [*prefix, *[3] * 40]})
        assert count_hit(4) == 224, "the first instance has computed two prompts with this prefix"


def test_lost_blocks_of_a_group_never_change_the_response(pair: Pair) -> None:
    """A block that is lost before the look-up shortens the hit. A block that is lost after it is computed."""
    prompts = make_prompts(5, "b")
    expected = {name: answer(prompt) for name, prompt in prompts.items()}
    assert pair.first.ask(prompts) == expected
    chooser = random.Random(1)
    for turn in range(2):
        lost = [key for key in pair.list_keys() if chooser.random() < (2 * turn + 1) / 12]
        pair.store.remove(lost)
        again = {f"{turn} {name}": prompt for name, prompt in prompts.items()}
        assert pair.second.scheduler.reset_prefix_cache()
        assert list(pair.second.ask(again).values()) == list(expected.values())


def test_blocks_that_are_lost_between_look_up_and_load_are_computed_again(pair: Pair) -> None:
    prompts = make_prompts(6, "c")
    expected = {name: answer(prompt) for name, prompt in prompts.items()}
    assert pair.first.ask(prompts) == expected
    pool = pair.second.workers[-1]._pool
    load = pool.get_blocks
    chooser = random.Random(2)

    def lose_and_load(hashes: Sequence[bytes], targets: Any, **options: Any) -> Any:
        if chooser.random() < 0.5:
            pool.remove_blocks([chooser.choice(hashes)], force=True)
        return load(hashes, targets, **options)

    pool.get_blocks = lose_and_load  # type: ignore[method-assign]
    assert pair.second.ask(prompts) == expected
    counts = pair.second.count_all()
    assert counts["load failed"] > 0


def test_missing_blocks_are_counted_by_group(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Pair(folder, "window", tmp_path)) as pair:
        prompt = list(range(330))
        assert pair.first.ask({"a": prompt}) == {"a": answer(prompt)}
        wanted = pair.first.half._name_blocks(make_plain_request(pair.first, prompt), 0, 20)
        pair.first.worker._pool.remove_blocks([wanted.name(1, 18), wanted.name(1, 19)], force=True)
        assert pair.second.ask({"b": prompt}) == {"b": answer(prompt)}
        assert pair.second.count_all()["sliding_window_40 missing"] == 2


def make_plain_request(instance: Instance, prompt: list[int]) -> Request:
    return Request("name", prompt, SamplingParams(max_tokens=1), None, block_hasher=instance._hasher)


@pytest.mark.parametrize("name", ["two windows", "block sizes", "state and window"])
def test_the_staged_route_transfers_the_same_blocks(folder: Path, tmp_path: Path, name: str) -> None:
    with contextlib.closing(Pair(folder, name, tmp_path, route="staged")) as pair:
        prompts = make_prompts(6, "d")
        expected = {name: answer(prompt) for name, prompt in prompts.items()}
        assert pair.first.ask(prompts) == expected
        assert pair.second.ask(prompts) == expected
        assert pair.second.count_all()["load ok"] > 0


def test_a_model_with_other_groups_finds_no_block(folder: Path, tmp_path: Path) -> None:
    """The two models differ only in the size of a window."""
    prompt = list(range(330))
    with contextlib.closing(Pair(folder, "window", tmp_path)) as pair:
        assert pair.first.ask({"a": prompt}) == {"a": answer(prompt)}
        with contextlib.closing(Instance(folder, [full(16), window(16, 56)], pair.store, tmp_path)) as other:
            other.half.learn_namespaces([pair.first.worker.namespace])
            assert other.ask({"b": prompt}, max_tokens=1) == {"b": answer(prompt, 1)}
            assert not other.count_all().get("load ok")
