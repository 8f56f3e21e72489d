"""Measure the share of needles that sparse attention finds, by representative, block size and budget.

    python examples/retrieval/quality.py --model needle --output results

Prompts are computed exactly, except for the last token, the question. This token is the first sparse step, so that all
four values are found only through selected blocks. ``random`` selects blocks at random. ``oracle`` selects the blocks
with the most attention weight. The program writes ``results/quality.json`` and, if matplotlib is installed,
``results/quality.png``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from train_needle import NUM_VALUES, make_texts

from engine.model.attention.block_index import Index, Search, best_blocks
from engine.model.attention.retrieval import Retrieval
from engine.model.checkpoint import load_model_config
from engine.model.model_runner import ModelRunner
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.request import Sequence as EngineSequence
from engine.scheduling.retrieval_config import REPRESENTATIVES, Regime, RetrievalConfig
from engine.scheduling.scheduler import Chunk
from engine.serving.surroundings import find_folder
from kvstore_backend.backend import ConfigError

INIT_TOKENS, LOCAL_TOKENS = 128, 256
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.4)
CHUNK = 1024


class RandomIndex(Index):
    """An index that selects blocks at random."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def add_blocks(self, row: int, first: int, keys: torch.Tensor) -> None:
        pass

    def search_blocks(self, layer: int, search: Search, queries: torch.Tensor, scale: float) -> torch.Tensor:
        blocks = search.hidden.shape[-1]
        scores = torch.rand(*queries.shape[:2], 1, blocks, generator=self._generator)
        return best_blocks(scores.masked_fill(search.hidden, -torch.inf), search.num_blocks) + search.all_blocks.start


class OracleIndex(Index):
    """An index that knows all keys, and selects the blocks to which dense attention gives the most weight."""

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}

    def add_blocks(self, row: int, first: int, keys: torch.Tensor) -> None:
        self._keys[row] = torch.cat([self._keys[row][:first], keys]) if first else keys

    def search_blocks(self, layer: int, search: Search, queries: torch.Tensor, scale: float) -> torch.Tensor:
        scores = []
        for row, query in zip(search.rows, queries, strict=True):
            keys = self._keys[row][search.all_blocks, layer]
            scores.append(torch.einsum("hgd,bhtd->hgbt", query, keys).mul(scale).logsumexp(-1))
        hidden = torch.stack(scores).masked_fill(search.hidden, -torch.inf)
        return best_blocks(hidden, search.num_blocks) + search.all_blocks.start


class Haystacks:
    """Texts of one length with computed KV, for many measurements with different settings."""

    def __init__(self, folder: Path, length: int, count: int) -> None:
        self._length = length
        self._texts = make_texts(count, length, torch.Generator().manual_seed(length))
        self._folder = folder
        self._runner = self._new_runner(128)
        for sequence in self._sequences(128, computed=0):
            while sequence.num_computed < length - 1:
                tokens = min(CHUNK, length - 1 - sequence.num_computed)
                self._runner.run([Chunk(sequence, tokens)])
                sequence.num_computed += tokens

    def _new_runner(self, block_size: int) -> ModelRunner:
        folder = str(self._folder)
        runner = ModelRunner(folder, load_model_config(folder), "cpu", torch.float32, block_size)
        runner.allocate_kv(len(self._texts.token_ids) * self._blocks(block_size))
        return runner

    def _blocks(self, block_size: int) -> int:
        return (self._length + 128) // block_size

    def _sequences(self, block_size: int, computed: int) -> list[EngineSequence]:
        sequences = []
        for i, token_ids in enumerate(self._texts.token_ids.tolist()):
            params = SamplingParams(1 + NUM_VALUES, temperature=0.0)
            sequence = EngineSequence(Request(str(i), tuple(token_ids[:-1]), params), block_size)
            sequence.token_ids.append(token_ids[-1])
            blocks = self._blocks(block_size)
            sequence.block_table = list(range(i * blocks, (i + 1) * blocks))
            sequence.num_computed = computed
            sequences.append(sequence)
        return sequences

    def cut(self, block_size: int) -> None:
        """Cut the same KV into blocks of another size."""
        old = self._runner.kv
        self._runner = self._new_runner(block_size)
        parts = old.shape[4] // block_size
        pieces = old.unflatten(4, (parts, block_size)).movedim(4, 1)
        self._runner.kv.copy_(pieces.reshape(self._runner.kv.shape))

    def ask(self, config: RetrievalConfig | None, index: Index | None = None) -> dict[str, float]:
        """Ask for the needles of all texts.

        Returns:
            ``first`` and ``all``: shares of the answers with a right first value, and with four right values;
            ``step_ms``: duration of the fastest step; ``read``: share of the blocks that the steps read.
        """
        block_size = self._runner.shape.block_size
        sequences = self._sequences(block_size, computed=self._length - 1)
        self._runner.retrieval = None
        if config:
            retrieval = Retrieval(config, self._runner.kv, len(sequences), self._length + 128)
            retrieval.index = index or retrieval.index
            self._runner.retrieval = retrieval
            for sequence in sequences:
                sequence.regime = Regime.SPARSE
                retrieval.index_blocks(sequence)
        seconds = []
        for _ in range(NUM_VALUES):
            start = time.monotonic()
            choices = self._runner.run([Chunk(sequence, 1) for sequence in sequences])
            seconds.append(time.monotonic() - start)
            for sequence, choice in zip(sequences, choices, strict=True):
                assert choice
                sequence.num_computed += 1
                sequence.token_ids.append(choice[0])
        answers = torch.tensor([sequence.token_ids[-NUM_VALUES:] for sequence in sequences])
        right = answers == self._texts.answers
        passed = sum(sequence.blocks_passed for sequence in sequences)
        return {
            "first": right[:, 0].float().mean().item(),
            "all": right.all(1).float().mean().item(),
            # The first step does not count: it is slower because nothing is in the CPU's caches.
            "step_ms": 1000 * min(seconds[1:]),
            "read": sum(sequence.blocks_read for sequence in sequences) / passed if passed else 1.0,
        }


def measure(folder: Path, count: int) -> list[dict[str, Any]]:
    """Measure all figures, and print each one when it is known."""
    results = []

    def ask(haystacks: Haystacks, length: int, block_size: int, name: str, budget: float) -> None:
        config, index = None, None
        if name != "dense":
            kind = name if name in REPRESENTATIVES else "mean"
            config = RetrievalConfig(block_size, INIT_TOKENS, LOCAL_TOKENS, budget, 0, representative=kind)
            index = {"random": RandomIndex, "oracle": OracleIndex}.get(name, lambda: None)()
        result = haystacks.ask(config, index)
        results.append({"length": length, "block": block_size, "choice": name, "budget": budget, **result})
        print(
            f"{length:6} {block_size:6} {name:>11} {budget:7.0%} {result['first']:6.2f} {result['all']:6.2f} "
            f"{result['read']:6.0%} {result['step_ms']:8.1f}",
            flush=True,
        )

    print("length  block      choice  budget  first    all   read  step ms")
    for length in (4096, 8192):
        haystacks = Haystacks(folder, length, count)
        for block_size in (128, 32):
            haystacks.cut(block_size)
            ask(haystacks, length, block_size, "dense", 1.0)
            for name in (*REPRESENTATIVES, "random", "oracle"):
                for budget in BUDGETS if length == 8192 and name in REPRESENTATIVES else (0.2,):
                    ask(haystacks, length, block_size, name, budget)
    return results


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy and step time over the budget, for each representative, with texts of 8K tokens."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed, so {path} is not drawn: pip install matplotlib")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7), sharex=True)
    for column, block_size in enumerate((32, 128)):
        for row, (value, label) in enumerate((("all", "all four values right"), ("step_ms", "step (ms)"))):
            axis = axes[row][column]
            chosen = [r for r in results if r["length"] == 8192 and r["block"] == block_size]
            for name in REPRESENTATIVES:
                line = sorted((r["budget"], r[value]) for r in chosen if r["choice"] == name)
                axis.plot([100 * budget for budget, _ in line], [y for _, y in line], marker="o", label=name)
            [dense] = [r[value] for r in chosen if r["choice"] == "dense"]
            axis.axhline(dense, color="black", linestyle=":", label="dense")
            axis.set_title(f"8K tokens, blocks of {block_size}")
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
            if row:
                axis.set_xlabel("budget: blocks recalled (%)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"drew {path}")


def main() -> None:
    """Measure the figures, print and draw them."""
    parser = argparse.ArgumentParser(description="Needles found by sparse attention.")
    parser.add_argument("--model", type=Path, required=True, help="the folder that train_needle.py wrote")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--texts", type=int, default=60, help="number of texts of each length")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        results = measure(Path(find_folder(str(args.model))), args.texts)
    except ConfigError as exc:
        sys.exit(f"{parser.prog}: {exc}")
    (args.output / "quality.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args.output / "quality.png")


if __name__ == "__main__":
    main()
