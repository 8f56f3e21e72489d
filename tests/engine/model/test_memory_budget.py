"""How many KV blocks there are: sparse attention's memory is put aside first, and too little of it is told at start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engine.model.memory_budget
import engine.model.sampler
from engine.args import parse_args
from engine.model.attention.block_index import BlockIndex
from engine.model.checkpoint import load_model_config
from engine.model.memory_budget import choose_num_blocks
from engine.model.model_runner import ModelRunner
from engine.model.sampler import Choice
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.scheduling.retrieval_config import REPRESENTATIVES, Regime, RetrievalConfig
from engine.scheduling.scheduler import Chunk
from kvcommon.formats import format_bytes
from kvstore_backend import ConfigError

BLOCK = 16
LINE = f"--model m --block-size {BLOCK} --max-model-len 400 --max-num-seqs 3"
SPARSE = "--enable-retrieval --retrieval-dense-boundary 64 --retrieval-init-tokens 16 --retrieval-local-tokens 40"


@pytest.fixture
def runner(tiny_checkpoint: Path) -> ModelRunner:
    return ModelRunner(str(tiny_checkpoint), load_model_config(str(tiny_checkpoint)), "cpu", torch.float32, BLOCK)


def choose(runner: ModelRunner, flags: str, free: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of KV blocks on a machine with so much free memory."""
    monkeypatch.setattr(runner, "count_free_bytes", lambda: free)
    return choose_num_blocks(parse_args([*LINE.split(), *flags.split()], {}), runner)


def count_retrieval_bytes(runner: ModelRunner) -> int:
    config = parse_args([*LINE.split(), *SPARSE.split()], {}).retrieval
    assert config
    return runner.count_retrieval_bytes(config, 3, 400)


@pytest.mark.parametrize("representative", REPRESENTATIVES)
@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("in_place", [True, False], ids=["CPU", "as on a GPU"])
def test_what_is_put_aside_is_what_sparse_attention_allocates_at_most(
    runner: ModelRunner, representative: str, dense_layers: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.model_runner.reads_host_memory", lambda device: in_place)
    config = RetrievalConfig(BLOCK, 16, 40, 0.3, 0, 0, representative, dense_layers=dense_layers)
    runner.allocate_kv(1)
    runner.enable_retrieval(config, 3, 400)
    retrieval = runner.retrieval
    assert retrieval
    assert isinstance(retrieval.index, BlockIndex)
    allocated = retrieval.index.nbytes + retrieval._chosen.nbytes + retrieval._places.nbytes
    for _ in range(0 if in_place else 3):
        sequence = Sequence(Request("", (1,) * 300, SamplingParams(100)), BLOCK)
        sequence.regime = Regime.SPARSE
        state = retrieval.state_of(sequence)
        allocated += sum(state.working_set(layer).kv.nbytes for layer in range(runner.shape.num_layers))
    assert runner.count_retrieval_bytes(config, 3, 400) == allocated


def test_kv_blocks_get_their_share_of_what_sparse_attention_leaves(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 400 * runner.shape.nbytes
    assert choose(runner, "", free, monkeypatch) == 100
    assert choose(runner, SPARSE, free + count_retrieval_bytes(runner), monkeypatch) == 100


@pytest.mark.parametrize(
    ("override", "blocks", "remedy"),
    [("", 4 * 25, "or set --num-gpu-blocks-override"), ("--num-gpu-blocks-override 30", 30, "or lower --num-gpu")],
    ids=["from memory", "asked for"],
)
def test_too_little_memory_for_sparse_attention_is_one_sentence(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, override: str, blocks: int, remedy: str
) -> None:
    enough = count_retrieval_bytes(runner) + blocks * runner.shape.nbytes
    assert choose(runner, f"{SPARSE} {override}", enough, monkeypatch) == (30 if override else 25)
    with pytest.raises(ConfigError) as caught:
        choose(runner, f"{SPARSE} {override}", enough - 4, monkeypatch)
    said = str(caught.value)
    assert said.startswith(f"sparse attention needs {format_bytes(count_retrieval_bytes(runner))} for --max-num-seqs 3")
    assert "KiB are free" in said
    assert remedy in said
    assert "\n" not in said


def test_memory_that_does_not_even_reach_for_sparse_attention_leaves_nothing(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"KV blocks may use 0 bytes"):
        choose(runner, SPARSE, 1000, monkeypatch)


def test_a_number_that_is_asked_for_is_given_whatever_memory_there_is(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(runner, "--num-gpu-blocks-override 30", 0, monkeypatch) == 30


def test_of_the_hosts_memory_a_quarter_is_taken_but_4_gib_at_most(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(runner, "", 1 << 40, monkeypatch) == (4 << 30) // runner.shape.nbytes


def test_blocks_that_there_is_no_memory_for_are_told_in_one_sentence(runner: ModelRunner) -> None:
    for blocks in (1 << 40, 1 << 70):
        with pytest.raises(
            ConfigError, match=f"there is not enough memory for {blocks} KV blocks; lower --num-gpu-blocks"
        ):
            runner.allocate_kv(blocks)


def test_free_memory_of_the_host_counts_what_the_system_would_give_up(runner: ModelRunner) -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    assert runner.count_free_bytes() == pytest.approx(available, rel=0.2)


class FakeGpu:
    """A fake: a GPU whose memory is a number, for a runner whose tensors have none ("meta").

    Args:
        runner: on that device.
        free: bytes, once the model is loaded.
        step: bytes that a step takes until they are given back.
    """

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, free: int, step: int = 0) -> None:
        self.chunks: list[Chunk] = []
        self.is_full = False
        """Whether a step finds no memory."""
        self._taken = 0
        self._step = step
        self._run = runner.run
        monkeypatch.setattr(runner, "count_free_bytes", lambda: free - self._taken)
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(engine.model.memory_budget, "_empty_cache", self.take_back)
        monkeypatch.setattr(engine.model.sampler, "fetch_numbers", lambda numbers: [1.0] * len(numbers))

    def run(self, chunks: list[Chunk]) -> list[Choice]:
        """A step."""
        self.chunks = chunks
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nAnd more.")
        self._taken = self._step
        return self._run(chunks)

    def take_back(self, device: torch.device) -> None:
        """Forget what steps took."""
        assert device.type == "meta"
        self._taken = 0


ON_GPU = parse_args(LINE.split(), {})


@pytest.fixture
def gpu_runner(tiny_checkpoint: Path) -> ModelRunner:
    """A runner for a fake GPU."""
    return ModelRunner(str(tiny_checkpoint), load_model_config(str(tiny_checkpoint)), "meta", torch.float32, BLOCK)


def test_on_a_gpu_kv_blocks_get_their_share_of_what_a_step_leaves(
    gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, step = 400 * gpu_runner.shape.nbytes, 99 * gpu_runner.shape.nbytes
    gpu = FakeGpu(gpu_runner, monkeypatch, free, step)
    assert choose_num_blocks(ON_GPU, gpu_runner) == int(0.9 * 301)
    assert not len(gpu_runner.kv), "blocks that were made to try a step are still there"
    assert sum(chunk.num_tokens for chunk in gpu.chunks) == 400 + 2
    assert {chunk.sequence.num_computed + chunk.num_tokens for chunk in gpu.chunks} == {400}
    assert len(gpu.chunks) == 3
    assert all(chunk.samples for chunk in gpu.chunks)


def test_on_a_gpu_blocks_on_their_way_to_the_pool_have_memory_put_aside(
    gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 30
    FakeGpu(gpu_runner, monkeypatch, free)
    alone = choose_num_blocks(ON_GPU, gpu_runner)
    beside_pool = choose_num_blocks(parse_args([*LINE.split(), "--kvcache-storage-backend", "memory"], {}), gpu_runner)
    assert alone == int(0.9 * free) // gpu_runner.shape.nbytes
    assert beside_pool < alone - (1 << 26) // gpu_runner.shape.nbytes


def test_too_little_memory_on_a_gpu_is_one_sentence(gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    step = 1 << 20
    FakeGpu(gpu_runner, monkeypatch, step + 20 * gpu_runner.shape.nbytes, step)
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(ON_GPU, gpu_runner)
    said = str(caught.value)
    assert said.startswith("a step needs 1 MiB for --max-num-seqs 3 of --max-model-len 400, and")
    assert said.endswith("lower --max-num-seqs or --max-model-len, or set --num-gpu-blocks-override")
    assert "\n" not in said


def test_no_memory_for_a_step_is_one_sentence(gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(gpu_runner, monkeypatch, 1 << 30).is_full = True
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(ON_GPU, gpu_runner)
    assert str(caught.value) == (
        "there is not enough memory for a step of 2048 tokens and 3 sequences; lower "
        "--max-num-batched-tokens, --max-num-seqs "
        "or --max-model-len: CUDA out of memory. Tried to allocate 1 GiB."
    )


def test_no_memory_for_the_first_token_does_not_count_as_a_model_that_cannot_be_run(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    runner.allocate_kv(1)
    monkeypatch.setattr(runner, "_compute_logits", refuse)
    with pytest.raises(ConfigError, match="there is not enough memory for one token; lower --max-num-batched-tokens"):
        runner.try_out()
