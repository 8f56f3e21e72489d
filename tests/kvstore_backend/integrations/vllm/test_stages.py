"""Instances with pipeline stages or data-parallel ranks: our connectors with vLLM's configurations and aggregator."""

from __future__ import annotations

import contextlib
import importlib
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvstore_backend.backend import Status
from kvstore_backend.integrations.vllm.connector import KVStoreConnector
from kvstore_backend.pool import BlockPool
from tests.kvstore_backend.integrations.vllm.test_connector import (
    BLOCK,
    HEADS,
    NUM_BLOCKS,
    LookUps,
    Table,
    VllmInstance,
    make_config,
    make_plain,
)
from tests.kvstore_backend.integrations.vllm.test_halves import Blocks, Request
from tests.kvstore_backend.test_namespace import checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore")
connector_module: Any = importlib.import_module("kvstore_backend.integrations.vllm.connector")
namespace_module: Any = importlib.import_module("kvstore_backend.integrations.vllm.namespace")
runner_module: Any = importlib.import_module("vllm.v1.worker.kv_connector_model_runner_mixin")

TOKENS = list(range(22))  # five blocks, and two tokens more
COMPUTED, LOADED = [7, 3, 5, 1, 2, 9], [4, 8, 11, 10, 6, 0]
LAYERS = 4


class Ranks:
    """Simulates vLLM's process groups: the stage and the rank of the next worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage = self.tp_rank = 0
        self.num_stages = 1
        monkeypatch.setattr(namespace_module, "get_tensor_model_parallel_rank", lambda: self.tp_rank)
        monkeypatch.setattr(namespace_module, "mark_changed_weights", lambda version, folder: version)
        for module in (connector_module, namespace_module):
            monkeypatch.setattr(module, "get_pp_group", self.get_pp_group)
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def get_pp_group(self) -> Any:
        return SimpleNamespace(rank_in_group=self.stage, is_last_rank=self.stage == self.num_stages - 1)


class StagedInstance(LookUps):
    """The scheduler's connector, and a worker's for each rank of each stage. The methods call them in vLLM's order."""

    def __init__(self, config: Any, ranks: Ranks, num_stages: int, num_tp: int = 1) -> None:
        object.__setattr__(config.parallel_config, "pipeline_parallel_size", num_stages)
        object.__setattr__(config.parallel_config, "tensor_parallel_size", num_tp)
        layer = config.compilation_config.static_forward_context["l0"]
        config.compilation_config.static_forward_context = {f"l{number}": layer for number in range(LAYERS)}
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS // num_tp, head_size=3, dtype=torch.float32)
        self.workers: dict[tuple[int, int], Any] = {}
        self.kv: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        caches = []
        size = LAYERS // num_stages
        for stage in range(num_stages):
            names = [f"l{number}" for number in range(stage * size, (stage + 1) * size)]
            for tp_rank in range(num_tp):
                ranks.stage, ranks.tp_rank, ranks.num_stages = stage, tp_rank, num_stages
                caches.append(KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(names, spec)]))
                worker = KVStoreConnector(config, KVConnectorRole.WORKER, caches[-1])
                kv = {name: torch.zeros(NUM_BLOCKS, HEADS // num_tp, BLOCK, 6) for name in names}
                worker.register_kv_caches(kv)
                self.workers[stage, tp_rank], self.kv[stage, tp_rank] = worker, kv
        self.scheduler = KVStoreConnector(config, KVConnectorRole.SCHEDULER, generate_scheduler_kv_cache_config(caches))
        self.ranks: dict[Any, Any] = {at: worker.get_handshake_metadata() for at, worker in self.workers.items()}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(self.ranks)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler, len(self.workers))
        self.scheduler.bind_gpu_block_pool(Blocks())

    @property
    def digests(self) -> list[str]:
        return [rank.namespace.digest for rank in self.ranks.values()]

    def step(self, scheduled: dict[str, int], tables: dict[str, list[int]]) -> Any:
        """Run one step of all workers; return their outputs, aggregated by vLLM."""
        state = SimpleNamespace(get_block_ids=lambda request_id: (tables[request_id],))
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=state)
        plan = self.scheduler.build_connector_meta(output)
        outputs = []
        for (stage, _), worker in self.workers.items():
            output_of_worker = self.step_worker(worker, pickle.loads(pickle.dumps(plan)), stage)
            outputs.append(ModelRunnerOutput.with_kv_conn_output_only(output_of_worker))
        # vLLM's executor uses the output of the last stage's first rank.
        aggregated = self.aggregator.aggregate(pickle.loads(pickle.dumps(outputs)), output_rank=len(outputs) - 1)
        assert aggregated is not None
        assert aggregated.kv_connector_output is not None
        self.scheduler.update_connector_output(aggregated.kv_connector_output)
        return aggregated.kv_connector_output

    def step_worker(self, worker: Any, plan: Any, stage: int) -> KVConnectorOutput:
        """Run one step of a worker; return its output for the scheduler."""
        worker.bind_connector_metadata(plan)
        worker.wait_for_save()
        worker.start_load_kv(None)
        results = worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
            kv_connector_stats=worker.get_kv_connector_stats(),
        )
        worker.clear_connector_metadata()
        return output

    def compute(self, request: Request, table: list[int]) -> None:
        """Compute a whole prompt, and end the request."""
        for at, kv in self.kv.items():
            for name, tensor in kv.items():
                for block_hash, block in zip(request.block_hashes, table, strict=False):
                    tensor[block] = fill(block_hash, name, at[1])
        self.scheduler.update_state_after_alloc(request, Table(table), 0)
        self.step({request.request_id: request.num_tokens}, {request.request_id: table})
        request.num_computed_tokens = request.num_tokens
        self.scheduler.request_finished(request, table)
        wait_until(lambda: self.step({}, {}) and not self.scheduler.has_pending_push_work(), "the saves")

    def load(self, request: Request, table: list[int]) -> tuple[Any, set[int]]:
        """Load a request; return the output in which the load ended, and the blocks that were not loaded."""
        matched, is_async = self.match(request)
        assert is_async
        self.scheduler.update_state_after_alloc(request, Table(table), matched)
        ended, invalid = [], set()

        def has_ended() -> bool:
            ended.append(self.step({}, {}))
            invalid.update(ended[-1].invalid_block_ids)
            return bool(ended[-1].finished_recving)

        wait_until(has_ended, "the load")
        return ended[-1], invalid

    def list_wrong(self, request: Request, table: Sequence[int]) -> list[tuple[Any, str, int]]:
        """Return the blocks with contents other than those that ``compute`` wrote."""
        return [
            (at, name, block)
            for at, kv in self.kv.items()
            for name, tensor in kv.items()
            for block_hash, block in zip(request.block_hashes, table, strict=False)
            if not bool((tensor[block] == fill(block_hash, name, at[1])).all())
        ]

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers.values():
            worker.shutdown()


class DraftingInstance(StagedInstance):
    """An instance with speculative decoding.

    vLLM's V1 model runner ends only the last stage's step, after the draft model. If vLLM broadcasts the output of the
    last stage, it ends the steps of all stages.
    """

    is_broadcast = False

    def __init__(self, config: Any, ranks: Ranks, num_stages: int, num_tp: int = 1) -> None:
        config.speculative_config = make_plain(SpeculativeConfig)
        self.saved_in: list[tuple[int, list[int]]] = []
        super().__init__(config, ranks, num_stages, num_tp)

    def step_worker(self, worker: Any, plan: Any, stage: int) -> KVConnectorOutput:
        planned = SimpleNamespace(kv_connector_metadata=plan, has_sync_kv_loads=False, finished_req_ids=set())
        begin_saves = worker._mover.start_saves

        def start_saves(saves: Any) -> None:
            self.saved_in.append((stage, [save.number for save in saves]))
            begin_saves(saves)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker._mover, "start_saves", start_saves)
            patch.setattr(runner_module, "get_kv_transfer_group", lambda: worker)
            patch.setattr(runner_module, "has_kv_transfer_group", lambda: True)
            patch.setattr(runner_module, "get_forward_context", lambda: None)
            with KVConnectorModelRunnerMixin._get_kv_connector_output(planned, defer_finalize=True) as output:
                pass
            if stage == max(self.workers)[0]:
                self.saved_in.append((stage, []))  # the draft model
            if self.is_broadcast or stage == max(self.workers)[0]:
                KVConnectorModelRunnerMixin.finalize_kv_connector()
        return output


def fill(block_hash: bytes, layer: str, tp_rank: int) -> float:
    """Return the contents of a block in one layer of one rank."""
    return block_hash[0] + 1000 * int(layer[1:]) + 10_000 * tp_rank


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made: Path = checkpoint(tmp_path / "model")
    return made


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def pair(
    request: pytest.FixtureRequest, ranks: Ranks, folder: Path, tmp_path: Path
) -> Iterator[tuple[StagedInstance, StagedInstance]]:
    """Yield two instances with two stages each."""
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                contextlib.closing(StagedInstance(make_config(folder, tmp_path / "pool"), ranks, 2, request.param))
            )
            for _ in range(2)
        )
        yield first, second


class TestStages:
    def test_an_instance_loads_blocks_that_another_computed(self, pair: tuple[StagedInstance, StagedInstance]) -> None:
        first, second = pair
        first.compute(Request("a", TOKENS), COMPUTED)
        request = Request("b", TOKENS)
        output, invalid = second.load(request, LOADED)
        assert (output.finished_recving, output.failed_recving, invalid) == ({"b"}, set(), set())
        assert second.list_wrong(request, LOADED[:5]) == []

    def test_each_rank_of_each_stage_has_a_namespace_of_its_own(
        self, pair: tuple[StagedInstance, StagedInstance]
    ) -> None:
        first, second = pair
        assert first.digests == second.digests
        assert len(set(first.digests)) == len(first.workers)
        assert all(rank.family is None for rank in first.ranks.values())

    def test_instances_with_another_number_of_stages_share_no_block(
        self, pair: tuple[StagedInstance, StagedInstance], ranks: Ranks, folder: Path, tmp_path: Path
    ) -> None:
        first, _ = pair
        first.compute(Request("a", TOKENS), COMPUTED)
        for num_stages in (1, 4):
            config = make_config(folder, tmp_path / "pool")
            with contextlib.closing(
                StagedInstance(config, ranks, num_stages, first.ranks[0, 0].namespace.tp_size)
            ) as other:
                assert not set(other.digests) & set(first.digests)
                assert other.match(Request("b", TOKENS)) == (0, False)

    def test_a_block_without_the_part_of_one_rank_is_not_a_hit(
        self, pair: tuple[StagedInstance, StagedInstance]
    ) -> None:
        first, second = pair
        for number, worker in enumerate(first.workers.values()):
            for lost in (0, 3):
                first.compute(Request(f"{number} {lost}", [1000 * number + lost, *TOKENS]), COMPUTED)
                prompt = Request(f"b {number} {lost}", [1000 * number + lost, *TOKENS])
                worker._mover._pool.remove_blocks([prompt.block_hashes[lost]], force=True)
                assert second.match(prompt) == (lost * BLOCK, lost > 0)

    def test_a_block_with_a_part_that_is_lost_after_the_look_up_is_computed(
        self, pair: tuple[StagedInstance, StagedInstance]
    ) -> None:
        first, second = pair
        for number, worker in enumerate(first.workers.values()):
            tokens = [1000 * number, *TOKENS]
            first.compute(Request(f"a {number}", tokens), COMPUTED)
            request = Request(f"b {number}", tokens)
            assert second.match(request) == (20, True)
            worker._mover._pool.remove_blocks([request.block_hashes[2]], force=True)
            output, invalid = second.load(request, LOADED)
            assert (output.finished_recving, invalid) == ({request.request_id}, set(LOADED[2:5]))
            assert second.list_wrong(request, LOADED[:2]) == []

    def test_without_saves_of_one_stage_there_are_no_hits(
        self, pair: tuple[StagedInstance, StagedInstance], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = pair
        pool: BlockPool = first.workers[1, 0]._mover._pool
        monkeypatch.setattr(pool, "save", lambda hashes, *given, **options: [Status.FAILED] * len(hashes))
        first.compute(Request("a", TOKENS), COMPUTED)
        assert second.match(Request("b", TOKENS)) == (0, False)


@pytest.mark.parametrize("is_broadcast", [False, True])
def test_each_stage_saves_once_with_speculative_decoding(
    ranks: Ranks, folder: Path, tmp_path: Path, is_broadcast: bool
) -> None:
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(contextlib.closing(DraftingInstance(make_config(folder, tmp_path / "pool"), ranks, 4)))
            for _ in range(2)
        )
        first.is_broadcast = second.is_broadcast = is_broadcast
        first.compute(Request("a", TOKENS), COMPUTED)
        # The last stage saves after its draft model.
        assert first.saved_in[:5] == [(0, [1]), (1, [1]), (2, [1]), (3, []), (3, [1])]
        assert not first.scheduler._planner.has_pins
        request = Request("b", TOKENS)
        output, invalid = second.load(request, LOADED)
        assert (output.finished_recving, output.failed_recving, invalid) == ({"b"}, set(), set())
        assert second.list_wrong(request, LOADED[:5]) == []


def test_data_parallel_ranks_share_blocks(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    """vLLM has a scheduler and workers for each data-parallel rank. Settings have the rank's number."""
    with contextlib.ExitStack() as stack:
        made = []
        for rank in range(2):
            config = make_config(folder, tmp_path / "pool")
            for name, value in {"size": 2, "rank": rank, "index": rank, "rank_local": rank, "size_local": 2}.items():
                object.__setattr__(config.parallel_config, f"data_parallel_{name}", value)
            config.kv_transfer_config.engine_id = f"engine_dp{rank}"
            made.append(stack.enter_context(contextlib.closing(VllmInstance(config))))
        alone = stack.enter_context(contextlib.closing(VllmInstance(make_config(folder, tmp_path / "pool"))))
        first, second = made
        assert first.rank.namespace == second.rank.namespace == alone.rank.namespace
        first.compute(Request("a", TOKENS), COMPUTED)
        results, invalid = second.load(Request("b", TOKENS), LOADED)
        assert (results.finished_recving, invalid) == ({"b"}, set())
