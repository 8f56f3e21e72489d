"""Measure quantised KV in the pool (``?kv=int8``, ``?kv=fp8``): the loss of quality, the bytes and the time.

    python benchmarks/quantised_kv.py                    # trains the needle model first: three minutes
    python benchmarks/quantised_kv.py --needle FOLDER    # the folder that examples/retrieval/train_needle.py wrote

Quality: the KV of a prompt is computed; its full blocks are quantised and restored, as after a hit in the pool; then
the answer is computed. Needles are a key and four values in a text of 4K tokens, with a question at its end.
Perplexity, equal tokens and equal answers are those of the small checkpoint (random weights), with prompts of random
words; its own answers without quantisation are the reference.

Time: blocks of a model with 24 layers and 2 KV heads of 64 elements are saved and loaded through the engine's staging
and a Mooncake pool. Another process holds the pool's memory; the bytes move over TCP on this machine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pool_overhead import memory_elsewhere, pool_config, running_master
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "retrieval"))
from train_needle import NUM_VALUES, make_texts, tokenizer, train  # noqa: E402

from engine.make_model import WORDS, make_model  # noqa: E402
from engine.pool.kv_codec import choose_codec, quantised_namespace  # noqa: E402
from kvstore_backend import BlockPool, Namespace, open_pool  # noqa: E402
from kvstore_backend.staging import KVTensors, StagedMemory  # noqa: E402

FORMS = ("", "int8", "fp8")
BLOCK = 64
NEEDLE_TOKENS = 4096
PROMPT_WORDS, ANSWER_TOKENS = 1000, 64
LAYERS, KV_HEADS, HEAD_DIM = 24, 2, 64
TIMED_TOKENS = 1024


class Quality(NamedTuple):
    """The quality of a model's answers after a hit on blocks of one form: not quantised, int8 or fp8.

    Attributes:
        perplexity: perplexity of the reference answers.
        same_token: share of the tokens that equal the reference.
        same_answer: share of the answers that equal the reference.
    """

    perplexity: float
    same_token: float
    same_answer: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Quality, bytes and time of KV that is stored in fewer bytes.")
    parser.add_argument("--needle", type=Path, metavar="FOLDER", help="a needle model; by default one is trained")
    parser.add_argument("--texts", type=int, default=60, help="number of texts with a needle (default 60)")
    parser.add_argument("--prompts", type=int, default=24, help="prompts for the small checkpoint (default 24)")
    parser.add_argument("--rounds", type=int, default=9, help="repetitions of save and load (default 9)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        needle = load_model(args.needle or train_needle_model(Path(folder) / "needle"))
        print("stored as  needles: first value  all four")
        for form in FORMS:
            first, whole = find_needles(needle, form, args.texts)
            print(f"{form or 'is':<9}  {first:>20.3f}  {whole:>8.3f}", flush=True)
        show_quality(Path(folder) / "small", args.prompts)
    show_times(args.rounds)
    return 0


def train_needle_model(folder: Path) -> Path:
    """Train a needle model into ``folder``."""
    with torch.inference_mode(False):
        train(0).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def find_needles(model: Any, form: str, count: int) -> tuple[float, float]:
    """Return the shares of the texts with a right first value, and with four right values."""
    texts = make_texts(count, NEEDLE_TOKENS, torch.Generator().manual_seed(1))
    found = torch.stack([answer_after_hit(model, text, form, NUM_VALUES) for text in texts.token_ids])
    right = found == texts.answers
    return right[:, 0].float().mean().item(), right.all(1).float().mean().item()


def show_quality(folder: Path, count: int) -> None:
    """Print the quality of the small checkpoint's answers with each form."""
    make_model(folder)
    model, words = load_model(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    draw = random.Random(1)
    prompts = [torch.tensor(words(" ".join(draw.choices(WORDS, k=PROMPT_WORDS)))["input_ids"]) for _ in range(count)]
    answers = [answer_after_hit(model, prompt, "", ANSWER_TOKENS) for prompt in prompts]
    print("\nstored as  perplexity  same next token  same answer")
    for form in FORMS:
        quality = rate_form(model, prompts, answers, form)
        figures = f"{quality.perplexity:>10.4f}  {quality.same_token:>15.4f}  {quality.same_answer:>11.3f}"
        print(f"{form or 'is':<9}  {figures}", flush=True)


def rate_form(model: Any, prompts: list[torch.Tensor], answers: list[torch.Tensor], form: str) -> Quality:
    """Compare the model's answers to prompts with KV in this form with the reference ``answers``."""
    losses, same_token, same_answer = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        cache = cache_after_hit(model, prompt, form)
        inputs = torch.cat([prompt[-1:], answer[:-1]])[None]
        logits = model(input_ids=inputs, past_key_values=cache).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, answer, reduction="none").tolist()
        same_token += (logits.argmax(-1) == answer).tolist()
        same_answer.append(torch.equal(answer_after_hit(model, prompt, form, len(answer)), answer))
    return Quality(math.exp(statistics.fmean(losses)), statistics.fmean(same_token), statistics.fmean(same_answer))


def answer_after_hit(model: Any, prompt: torch.Tensor, form: str, count: int) -> torch.Tensor:
    """Return the greedy answer of ``count`` tokens to a prompt with its full blocks in this form."""
    cache = cache_after_hit(model, prompt, form)
    tokens = [prompt[-1]]
    for _ in range(count):
        logits = model(input_ids=tokens[-1].view(1, 1), past_key_values=cache).logits
        tokens.append(logits[0, -1].argmax())
    return torch.stack(tokens[1:])


def cache_after_hit(model: Any, prompt: torch.Tensor, form: str) -> Any:
    """Compute the KV of a prompt without its last token; quantise and restore its full blocks with this form."""
    cache = DynamicCache()
    model(input_ids=prompt[None, :-1], past_key_values=cache, logits_to_keep=1)
    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
    full = kv.shape[-2] // BLOCK * BLOCK
    blocks = kv[..., :full, :].unflatten(-2, (-1, BLOCK)).movedim(-3, 0).contiguous()
    codec = choose_codec(quantised_namespace(make_namespace("float32"), form), blocks)
    if codec is not None:
        rows = codec.encode(blocks.clone().flatten(1).view(torch.uint8))
        blocks = codec.decode(rows).view(blocks.dtype).view(blocks.shape)
    kv[..., :full, :] = blocks.movedim(0, -3).flatten(-3, -2)
    for layer, (keys, values) in zip(cache.layers, kv, strict=True):
        layer.keys, layer.values = keys[None], values[None]
    return cache


def make_namespace(dtype: str) -> Namespace:
    return Namespace("benchmark", dtype, BLOCK, LAYERS, KV_HEADS, HEAD_DIM, "layer,kv,head,token,dim")


def show_times(rounds: int) -> None:
    """Print the bytes and the times of saves and loads, for each dtype and form."""
    print(f"\n{'KV':<9} stored as  MiB of {TIMED_TOKENS} tokens    save ms    load ms  encode ms  decode ms")
    with running_master() as master, memory_elsewhere(master):
        for dtype in (torch.float32, torch.bfloat16):
            for form in FORMS:
                namespace = quantised_namespace(make_namespace(str(dtype).removeprefix("torch.")), form)
                with open_pool(pool_config(master, 0), namespace, background=False) as pool:
                    show_time(pool, dtype, form, rounds)


def show_time(pool: BlockPool, dtype: torch.dtype, form: str, rounds: int) -> None:
    """Print one row: the bytes, and the shortest times of saves and loads through the engine's staging."""
    count = TIMED_TOKENS // BLOCK
    kv = torch.randn(2 * count, LAYERS, 2, KV_HEADS, BLOCK, HEAD_DIM).to(dtype)
    memory = StagedMemory(KVTensors([kv], len(kv)), pool, choose_codec(pool.namespace, kv))
    times: dict[str, list[float]] = {"save": [], "load": [], "encode": [], "decode": []}
    nbytes = 0
    for number in range(rounds):
        hashes = [number.to_bytes(16, "little") + i.to_bytes(16, "little") for i in range(count)]
        start = time.perf_counter()
        outgoing = memory.open_outgoing(range(count), None)
        outgoing.wait()
        times["encode"].append(time.perf_counter() - start)
        assert len(outgoing.values) == count
        assert all(pool.save(hashes, outgoing.values))
        times["save"].append(time.perf_counter() - start)
        nbytes = sum(span.nbytes for value in outgoing.values for span in value)
        outgoing.take_back()
        incoming = memory.open_incoming(range(count, 2 * count), None)
        start = time.perf_counter()
        assert all(pool.get_blocks(hashes, incoming.values))
        decoding = time.perf_counter()
        incoming.deliver(count)
        incoming.wait()
        times["decode"].append(time.perf_counter() - decoding)
        times["load"].append(time.perf_counter() - start)
        incoming.take_back()
    pool.clear()
    name = str(dtype).removeprefix("torch.")
    figures = "".join(f"{1e3 * min(taken):>11.1f}" for taken in times.values())
    print(f"{name:<9} {form or 'is':<9}  {nbytes / 2**20:>18.2f}{figures}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
