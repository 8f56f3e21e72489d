"""The number of KV blocks: sparse attention reserves its memory first, and too little memory is an error at start."""

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
    """Return the number of KV blocks on a machine with ``free`` bytes of memory."""
    monkeypatch.setattr(runner, "count_free_bytes", lambda: free)
    return choose_num_blocks(parse_args([*LINE.split(), *flags.split()], {}), runner)


def count_retrieval_bytes(runner: ModelRunner) -> int:
    config = parse_args([*LINE.split(), *SPARSE.split()], {}).retrieval
    assert config
    return runner.count_retrieval_bytes(config, 3, 400)


@pytest.mark.parametrize("representative", REPRESENTATIVES)
@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("in_place", [True, False], ids=["CPU", "as on a GPU"])
def test_the_reserved_memory_is_the_maximum_that_sparse_attention_allocates(
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


def test_kv_blocks_get_their_share_of_the_memory_without_sparse_attention(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 400 * runner.shape.nbytes
    assert choose(runner, "", free, monkeypatch) == 100
    assert choose(runner, SPARSE, free + count_retrieval_bytes(runner), monkeypatch) == 100


@pytest.mark.parametrize(
    ("override", "blocks", "remedy"),
    [("", 4 * 25, "or set --num-gpu-blocks-override"), ("--num-gpu-blocks-override 30", 30, "or lower --num-gpu")],
    ids=["from memory", "override"],
)
def test_too_little_memory_for_sparse_attention_is_one_sentence(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, override: str, blocks: int, remedy: str
) -> None:
    enough = count_retrieval_bytes(runner) + blocks * runner.shape.nbytes
    assert choose(runner, f"{SPARSE} {override}", enough, monkeypatch) == (30 if override else 25)
    with pytest.raises(ConfigError) as caught:
        choose(runner, f"{SPARSE} {override}", enough - 4, monkeypatch)
    message = str(caught.value)
    assert message.startswith(
        f"sparse attention needs {format_bytes(count_retrieval_bytes(runner))} for --max-num-seqs 3"
    )
    assert "KiB are free" in message
    assert remedy in message
    assert "\n" not in message


def test_no_memory_remains_if_sparse_attention_needs_more_than_there_is(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"KV blocks may use 0 bytes"):
        choose(runner, SPARSE, 1000, monkeypatch)


def test_an_override_of_the_number_of_blocks_does_not_depend_on_memory(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(runner, "--num-gpu-blocks-override 30", 0, monkeypatch) == 30


def test_blocks_use_a_quarter_of_the_hosts_memory_and_at_most_4_gib(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(runner, "", 1 << 40, monkeypatch) == (4 << 30) // runner.shape.nbytes


def test_the_error_for_too_many_blocks_is_one_sentence(runner: ModelRunner) -> None:
    for blocks in (1 << 40, 1 << 70):
        with pytest.raises(
            ConfigError, match=f"there is not enough memory for {blocks} KV blocks; lower --num-gpu-blocks"
        ):
            runner.allocate_kv(blocks)


def test_free_memory_of_the_host_includes_memory_that_the_system_can_reclaim(runner: ModelRunner) -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    assert runner.count_free_bytes() == pytest.approx(available, rel=0.2)


class FakeGpu:
    """A simulated GPU that counts its free memory, for a runner on torch's device without memory ("meta").

    Args:
        runner: the runner on that device.
        free: free bytes after the model is loaded.
        step: bytes that a step allocates, until ``empty_cache``.
    """

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, free: int, step: int = 0) -> None:
        self.chunks: list[Chunk] = []
        self.is_full = False
        """Whether a step raises an out-of-memory error."""
        self._allocated = 0
        self._step = step
        self._run = runner.run
        monkeypatch.setattr(runner, "count_free_bytes", lambda: free - self._allocated)
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(engine.model.memory_budget, "_empty_cache", self.empty_cache)
        monkeypatch.setattr(engine.model.sampler, "fetch_numbers", lambda numbers: [1.0] * len(numbers))

    def run(self, chunks: list[Chunk]) -> list[Choice]:
        self.chunks = chunks
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nAnd more.")
        self._allocated = self._step
        return self._run(chunks)

    def empty_cache(self, device: torch.device) -> None:
        assert device.type == "meta"
        self._allocated = 0


ON_GPU = parse_args(LINE.split(), {})


@pytest.fixture
def gpu_runner(tiny_checkpoint: Path) -> ModelRunner:
    return ModelRunner(str(tiny_checkpoint), load_model_config(str(tiny_checkpoint)), "meta", torch.float32, BLOCK)


def test_on_a_gpu_kv_blocks_get_their_share_of_the_memory_without_a_step(
    gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, step = 400 * gpu_runner.shape.nbytes, 99 * gpu_runner.shape.nbytes
    gpu = FakeGpu(gpu_runner, monkeypatch, free, step)
    assert choose_num_blocks(ON_GPU, gpu_runner) == int(0.9 * 301)
    assert not len(gpu_runner.kv), "the blocks of the trial step were not released"
    assert sum(chunk.num_tokens for chunk in gpu.chunks) == 400 + 2
    assert {chunk.sequence.num_computed + chunk.num_tokens for chunk in gpu.chunks} == {400}
    assert len(gpu.chunks) == 3
    assert all(chunk.samples for chunk in gpu.chunks)


def test_on_a_gpu_memory_is_reserved_for_blocks_that_are_being_saved(
    gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 30
    FakeGpu(gpu_runner, monkeypatch, free)
    without_pool = choose_num_blocks(ON_GPU, gpu_runner)
    with_pool = choose_num_blocks(parse_args([*LINE.split(), "--kvcache-storage-backend", "memory"], {}), gpu_runner)
    assert without_pool == int(0.9 * free) // gpu_runner.shape.nbytes
    assert with_pool < without_pool - (1 << 26) // gpu_runner.shape.nbytes


def test_too_little_memory_on_a_gpu_is_one_sentence(gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    step = 1 << 20
    FakeGpu(gpu_runner, monkeypatch, step + 20 * gpu_runner.shape.nbytes, step)
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(ON_GPU, gpu_runner)
    message = str(caught.value)
    assert message.startswith("a step needs 1 MiB for --max-num-seqs 3 of --max-model-len 400, and")
    assert message.endswith("lower --max-num-seqs or --max-model-len, or set --num-gpu-blocks-override")
    assert "\n" not in message


def test_no_memory_for_a_step_is_one_sentence(gpu_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(gpu_runner, monkeypatch, 1 << 30).is_full = True
    with pytest.raises(ConfigError) as caught:
        choose_num_blocks(ON_GPU, gpu_runner)
    assert str(caught.value) == (
        "there is not enough memory for a step of 2048 tokens and 3 sequences; lower "
        "--max-num-batched-tokens, --max-num-seqs "
        "or --max-model-len: CUDA out of memory. Tried to allocate 1 GiB."
    )


def test_the_error_for_too_little_memory_for_the_first_token_says_so(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    runner.allocate_kv(1)
    monkeypatch.setattr(runner, "_compute_logits", refuse)
    with pytest.raises(ConfigError, match="there is not enough memory for one token; lower --max-num-batched-tokens"):
        runner.try_out()
