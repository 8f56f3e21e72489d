"""Compare sparse with dense attention at 16K to 128K tokens: time of attention alone and of whole steps, and memory.

    python benchmarks/retrieval.py                 # a few minutes, 6 GiB
    python benchmarks/retrieval.py --lengths 64K   # while working on it

The model has one layer with 8 KV heads of 128 elements, and the default window and budget. Attention alone is compared
with one plain read of contiguous K and V, the fastest possible dense attention; whole steps are compared with the
engine's own paged attention. The ceiling is the highest possible speed-up, if only the number of read tokens mattered:
tokens / (window + share of the rest).

Keys and queries are random walks (along the text, and from step to step), so that neighbours are similar, as in real
models. ``still`` repeats the same query, and reads the same blocks in each step. ``jumping`` draws independent queries,
so that nearly all blocks change; as blocks are read in place, this must not matter. Dense and sparse steps
alternate, and the fastest of each counts, because other work on the machine slows both; another column shows the
medians. ``resident`` is the share of a sequence's KV that a GPU would have to hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.model.attention.retrieval import Retrieval, SparseState
from engine.model.checkpoint import load_model_config
from engine.model.model_runner import ModelRunner
from engine.scheduling.request import Request, SamplingParams, Sequence
from engine.scheduling.retrieval_config import Regime, RetrievalConfig
from engine.scheduling.scheduler import Chunk

KV_HEADS, GROUP, DIM = 8, 2, 128
BLOCK = 128
HIDDEN = KV_HEADS * GROUP * DIM
CONFIG = RetrievalConfig(BLOCK)
LIKENESS = {"still": 1.0, "walking": 0.98, "jumping": 0.0}
SPEED_BAR, MEMORY_BAR = 0.6, 0.25


def walk(steps: int, likeness: float, *shape: int) -> torch.Tensor:
    """Return a random walk ``[steps, *shape]`` of variance 1, in which each step is similar to the previous one."""
    values = torch.randn(steps, *shape)
    for step in range(1, steps):
        values[step].mul_((1 - likeness**2) ** 0.5).add_(values[step - 1], alpha=likeness)
    return values


def sequence_of(tokens: int, max_tokens: int, regime: Regime) -> Sequence:
    """Return a sequence of ``tokens`` tokens; only the last one is not computed. Its KV is in blocks 0, 1, ..."""
    sequence = Sequence(Request("", (1,) * (tokens - 1), SamplingParams(max_tokens, temperature=0.0)), BLOCK)
    sequence.token_ids.append(1)
    sequence.num_computed = tokens - 1
    sequence.block_table = list(range(-(-(tokens + max_tokens) // BLOCK)))
    sequence.regime = regime
    return sequence


def alternate(steps: int, *works: Callable[[int], object]) -> list[list[float]]:
    """Call the functions alternately, ``steps`` times each; return for each its milliseconds, sorted."""
    times: list[list[float]] = [[] for _ in works]
    for step in range(steps):
        for work, taken in zip(works, times, strict=True):
            start = time.perf_counter()
            work(step)
            taken.append(1000 * (time.perf_counter() - start))
    return [sorted(taken) for taken in times]


class AttentionOnly:
    """The attention of one layer over one sequence of ``tokens`` tokens."""

    def __init__(self, tokens: int, steps: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        blocks = tokens // BLOCK
        self._dense = torch.empty(2, 1, KV_HEADS, tokens, DIM, dtype=dtype)
        self._dense[0, 0] = walk(tokens // 8, 0.95, KV_HEADS, DIM).movedim(0, 1).repeat_interleave(8, 1)
        self._dense[0] += 0.3 * torch.randn(KV_HEADS, tokens, DIM)
        self._dense[1].normal_()
        # [2, head, block * token, dim] -> [block, layer, 2, head, token, dim]
        kv = self._dense[:, 0].unflatten(2, (blocks, BLOCK)).movedim(2, 0)[:, None].contiguous()
        self._kv = kv
        self._steps = steps

    def run(self, motion: str) -> tuple[list[float], list[float]]:
        """Return the milliseconds of dense and of sparse steps, both sorted.

        Args:
            motion: how much the queries change from step to step: ``still``, ``walking`` or ``jumping``.
        """
        retrieval = Retrieval(CONFIG, self._kv, 1, self.tokens)
        sequence = sequence_of(self.tokens, 1, Regime.OFFLOADED)
        state: SparseState = retrieval.state_of(sequence)
        retrieval.index_blocks(sequence)
        queries = walk(self._steps + 1, LIKENESS[motion], 1, KV_HEADS, GROUP, DIM).to(self._kv.dtype)
        retrieval.attend_sparsely(0, [state], queries[0], None)  # the first one plans the step

        def dense(step: int) -> None:
            scaled_dot_product_attention(queries[step + 1], *self._dense)

        def sparse(step: int) -> None:
            retrieval.attend_sparsely(0, [state], queries[step + 1], None)

        dense_ms, sparse_ms = alternate(self._steps, dense, sparse)
        self.index = retrieval.index.nbytes / self._kv.nbytes  # type: ignore[attr-defined]
        return dense_ms, sparse_ms


def whole_steps(folder: Path, lengths: list[int], steps: int) -> None:
    """Print the times of whole steps of a model with one layer, dense and sparse, in the engine's own runner."""
    runner = ModelRunner(str(folder), load_model_config(str(folder)), "cpu", torch.float32, BLOCK)
    runner.allocate_kv(-(-(max(lengths) + steps) // BLOCK) + 1)
    runner.kv.normal_()
    print(f"\nwhole steps, {HIDDEN} wide, vocabulary of {runner.vocab_size}; dense: the engine's paged attention")
    print(f"{'tokens':>7} {'dense ms':>9} {'sparse ms':>10} {'speed-up':>9} {'read':>6}")
    for tokens in lengths:
        runner.enable_retrieval(CONFIG, 1, tokens + steps)
        assert runner.retrieval
        dense, sparse = (sequence_of(tokens, steps + 1, regime) for regime in (Regime.DENSE, Regime.OFFLOADED))
        runner.retrieval.index_blocks(sparse)

        def step(sequence: Sequence, number: int = 0) -> None:
            [choice] = runner.run([Chunk(sequence, 1)])
            assert choice
            sequence.num_computed += 1
            sequence.token_ids.append(choice[0])

        step(sparse)
        dense_ms, sparse_ms = (taken[0] for taken in alternate(steps - 1, partial(step, dense), partial(step, sparse)))
        read = sparse.blocks_read / sparse.blocks_passed
        print(
            f"{tokens >> 10:6}K {dense_ms:9.1f} {sparse_ms:10.1f} {dense_ms / sparse_ms:8.2f}x {read:6.1%}", flush=True
        )


def attention_only(lengths: list[int], steps: int, dtype: torch.dtype) -> None:
    """Print the times of one layer's attention, and compare them with the bars."""
    print(f"attention only: {KV_HEADS} KV heads, {GROUP} queries each, d = {DIM}, {dtype}, blocks of {BLOCK}")
    print(
        f"{'tokens':>7} {'queries':>8} {'dense ms':>9} {'sparse ms':>10} {'speed-up':>9} {'ceiling':>8} {'of it':>6} "
        f"{'medians':>8} {'resident':>9} {'index':>6}"
    )
    for tokens in lengths:
        layer = AttentionOnly(tokens, steps, dtype)
        window = 8192
        ceiling = tokens / (window + CONFIG.topk_percent * (tokens - window))
        resident = CONFIG.max_blocks_read(tokens, 0) * BLOCK / tokens
        for motion in LIKENESS:
            dense_ms, sparse_ms = layer.run(motion)
            speed_up, usual = (dense_ms[i] / sparse_ms[i] for i in (0, steps // 2))
            bar = ""
            if tokens >= 64 << 10:
                bar = "reached" if speed_up >= SPEED_BAR * ceiling else f"below the bar of {SPEED_BAR}"
            if tokens == 128 << 10 and resident > MEMORY_BAR:
                bar += f"; more than {MEMORY_BAR} resident"
            print(
                f"{tokens >> 10:6}K {motion:>8} {dense_ms[0]:9.2f} {sparse_ms[0]:10.2f} {speed_up:8.2f}x "
                f"{ceiling:7.2f}x {speed_up / ceiling:6.2f} {usual / ceiling:8.2f} {resident:9.3f} "
                f"{layer.index:6.3f}  {bar}",
                flush=True,
            )


def write_model(folder: Path) -> None:
    """Write a checkpoint with one layer of random weights."""
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1 << 18,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def tokens_of(text: str) -> int:
    """Parse a number of tokens such as ``64K``."""
    digits = text.removesuffix("K")
    if digits == text or not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a length; give one such as 64K")
    return int(digits) << 10


def main() -> None:
    """Measure all figures and print them."""
    parser = argparse.ArgumentParser(description="Compare sparse with dense attention.")
    parser.add_argument(
        "--lengths", type=tokens_of, nargs="+", metavar="64K", default=[n << 10 for n in (16, 32, 64, 128)]
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype for attention alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        attention_only(args.lengths, args.steps, getattr(torch, args.dtype))
        with TemporaryDirectory() as folder:
            write_model(Path(folder))
            whole_steps(Path(folder), args.lengths, args.steps)


if __name__ == "__main__":
    main()
