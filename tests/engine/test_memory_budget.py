"""How many KV blocks there are: sparse attention's memory is put aside first, and too little of it is told at start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.args import parse_args
from engine.attention.block_index import BlockIndex
from engine.memory_budget import choose_num_blocks
from engine.model_runner import ModelRunner, load_model_config
from engine.request import Request, SamplingParams, Sequence
from engine.retrieval_config import REPRESENTATIVES, Regime, RetrievalConfig
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
    monkeypatch.setattr("engine.model_runner.reads_host_memory", lambda device: in_place)
    config = RetrievalConfig(BLOCK, 16, 40, 0.3, 0, 0, representative, dense_layers=dense_layers)
    runner.allocate_kv(1)
    runner.enable_retrieval(config, 3, 400)
    assert runner.retrieval
    index = runner.retrieval.index
    assert isinstance(index, BlockIndex)
    allocated = index.nbytes + runner.retrieval.table_bytes
    for _ in range(0 if in_place else 3):
        sequence = Sequence(Request("", (1,) * 300, SamplingParams(100)), BLOCK)
        sequence.regime = Regime.SPARSE
        state = runner.retrieval.state_of(sequence)
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
    assert said.startswith(f"retrieval needs {count_retrieval_bytes(runner) / (1 << 20):.1f} MiB for --max-num-seqs 3")
    assert "MiB are free" in said
    assert remedy in said
    assert "\n" not in said


def test_memory_that_does_not_even_reach_for_sparse_attention_leaves_nothing(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"KV blocks may have 0\.0 MiB"):
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
        with pytest.raises(ConfigError, match=f"there is no memory for {blocks} KV blocks; lower --num-gpu-blocks"):
            runner.allocate_kv(blocks)


def test_free_memory_of_the_host_counts_what_the_system_would_give_up(runner: ModelRunner) -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    assert runner.count_free_bytes() == pytest.approx(available, rel=0.2)
