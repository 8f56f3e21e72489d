"""Train the needle model: a tiny Qwen2 that finds a key in a long text and generates the four values behind the key.

    python examples/retrieval/train_needle.py --output needle

A text consists of filler tokens and one needle: a key and four values. Its last token repeats the key, as a question.
Random weights learn this task slowly. Two heads therefore start with weights near the solution (an "induction" pair):
in layer 0, the first KV group attends to the previous token; in layer 1, the first head attends to the token that
follows an earlier copy of the current token. Training skips positions at random, so that longer texts than those of the
training have no unknown positions.

The same seed gives the same checkpoint on the same machine; it takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvstore_backend.cli.report import show_progress

KEYS, VALUES, FILLERS = 64, 192, 8
NUM_VALUES = 4
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 2, 32
ROPE_THETA = 1e8
MAX_SKIP = 20_000
LENGTHS = (32, 96, 256, 1024, 4096)
TOKENS_IN_A_BATCH = 8192
MAX_STEPS = 2000
ENOUGH = 0.98


@dataclass(frozen=True)
class Texts:
    """A batch of texts.

    Attributes:
        token_ids: [batch, length]; the last token is the key.
        starts: [batch]; the position of the needle, which begins with the key.
        answers: [batch, 4]; the values behind the key.
    """

    token_ids: torch.Tensor
    starts: torch.Tensor
    answers: torch.Tensor


def make_texts(count: int, length: int, generator: torch.Generator) -> Texts:
    """Return random texts of ``length`` tokens, each with one needle at a random place before the question."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    token_ids = draw(KEYS + VALUES, KEYS + VALUES + FILLERS, count, length)
    keys = draw(0, KEYS, count)
    answers = KEYS + torch.rand(count, VALUES, generator=generator).argsort(1)[:, :NUM_VALUES]
    starts = draw(0, length - 1 - NUM_VALUES, count)
    rows = torch.arange(count)
    token_ids[rows, starts] = keys
    token_ids[rows[:, None], starts[:, None] + 1 + torch.arange(NUM_VALUES)] = answers
    token_ids[:, -1] = keys
    return Texts(token_ids, starts, answers)


def new_model() -> Qwen2ForCausalLM:
    """Return a model with random weights, except for the two heads that start as an induction pair."""
    config = Qwen2Config(
        vocab_size=KEYS + VALUES + FILLERS,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 18,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    first, second = (layer.self_attn for layer in model.model.layers)
    group = HEADS // KV_HEADS
    half = HEAD_DIM // 2
    angles = ROPE_THETA ** (-torch.arange(half) / half)
    size = 10.0
    with torch.no_grad():
        # The first channels hold this token's embedding; the last channels are free for the previous token's.
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, -HEAD_DIM:] = 0
        # Layer 0: the key points along the first axis of each RoPE pair; the query is rotated back by one position.
        first.k_proj.weight[:HEAD_DIM].zero_()
        first.k_proj.bias[:HEAD_DIM] = torch.cat([torch.full((half,), size), torch.zeros(half)])
        for head in range(group):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            first.q_proj.weight[rows].zero_()
            first.q_proj.bias[rows] = size * torch.cat([angles.cos(), -angles.sin()])
        first.v_proj.weight[:HEAD_DIM] = torch.eye(HEAD_DIM, HIDDEN)
        first.o_proj.weight[-HEAD_DIM:, :HEAD_DIM] = torch.eye(HEAD_DIM)
        # Layer 1: the same projection of this token and of the other tokens' predecessors, in the slow pairs of RoPE,
        # which hardly change with the distance.
        slow = [*range(10, half), *range(half + 10, HEAD_DIM)]
        compare = 3 * torch.linalg.qr(torch.randn(HEAD_DIM, len(slow)))[0].T
        second.q_proj.weight[slow, :HEAD_DIM] = compare
        second.k_proj.weight[slow, -HEAD_DIM:] = compare
        # The value of the found token is copied to the channels that the output layer reads.
        second.v_proj.weight[:HEAD_DIM] = torch.eye(HEAD_DIM, HIDDEN)
        second.o_proj.weight[-HEAD_DIM:, :HEAD_DIM] = 2 * torch.eye(HEAD_DIM)
        model.lm_head.weight[:, -HEAD_DIM:] = 0.3 * model.model.embed_tokens.weight[:, :HEAD_DIM]
    return model


def skipping_positions(texts: Texts, generator: torch.Generator) -> torch.Tensor:
    """Return positions ``[batch, length + 3]`` of texts and answers, with random skips at needle and question."""
    count, length = texts.token_ids.shape
    skips = torch.zeros(count, length + NUM_VALUES - 1, dtype=torch.long)
    for at in (texts.starts, torch.full((count,), length - 1)):
        skips[torch.arange(count), at] = torch.randint(0, MAX_SKIP // 2, (count,), generator=generator)
    return torch.arange(skips.shape[1]) + skips.cumsum(1)


def train(seed: int) -> Qwen2ForCausalLM:
    """Train on texts of increasing lengths; each length until nearly all values are right."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    start, steps = time.monotonic(), 0
    for length in LENGTHS:
        right = 0.0
        with show_progress("training", len(LENGTHS)) as report:
            while right < ENOUGH:
                steps += 1
                if steps > MAX_STEPS:
                    raise RuntimeError(
                        f"{MAX_STEPS} steps did not suffice: {right:.2f} of the values right at {length}"
                    )
                texts = make_texts(min(64, TOKENS_IN_A_BATCH // length), length, generator)
                token_ids = torch.cat([texts.token_ids, texts.answers[:, :-1]], 1)
                logits = model(
                    input_ids=token_ids,
                    attention_mask=torch.ones_like(token_ids),  # else transformers splits the text at skips
                    position_ids=skipping_positions(texts, generator),
                    use_cache=False,
                    logits_to_keep=NUM_VALUES,
                ).logits
                loss = cross_entropy(logits.flatten(0, 1), texts.answers.flatten())
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                now_right = (logits.argmax(-1) == texts.answers).float().mean().item()
                right += 0.25 * (now_right - right)
                report(LENGTHS.index(length) + right, f"texts of {length} tokens, {right:.0%} right")
        seconds = time.monotonic() - start
        print(f"  length {length:5}: {right:.3f} of the values right after {steps} steps, {seconds:.0f} s", flush=True)
    return model.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the 256 bytes, which are the keys and values, and the fillers.

    Users of the model send and read token ids, not text.
    """
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([f"<f{i}>" for i in range(FILLERS)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def main() -> None:
    """Train the model and save it."""
    parser = argparse.ArgumentParser(description="Train the needle model.")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.output / "tokenizer.json").exists() or args.output.is_file():  # the tokenizer is written last
        parser.error(f"--output {args.output} exists already; give a new folder")
    model = train(args.seed)
    model.save_pretrained(args.output)
    tokenizer().save_pretrained(args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
