"""Quantised blocks: their errors, their sizes, and their separate namespaces."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine.pool.kv_codec import choose_codec, quantised_namespace
from kvstore_backend.stores.memory import MemoryStore
from tests.engine.checkpoints import VOCAB_SIZE
from tests.engine.faulty_store import FaultyStore
from tests.engine.running import Engine
from tests.faults.blocks import NAMESPACE

SHAPE = (3, 2, 2, 2, 16, 8)
"""Blocks, layers, K and V, heads, tokens, dimensions."""


def make_kv(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make KV with channels like those of real keys: some are a thousand times larger, and some are far from zero."""
    random_kv = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    size = 10 ** torch.linspace(-1.5, 1.5, SHAPE[-1])
    return ((random_kv + torch.linspace(-2, 2, SHAPE[-1])) * size).to(dtype)


def encode_and_decode(kv: torch.Tensor, form: str) -> torch.Tensor:
    codec = choose_codec(quantised_namespace(NAMESPACE, form), kv)
    assert codec is not None
    encoded = codec.encode(kv.clone().flatten(1).view(torch.uint8))
    assert (encoded.dtype, encoded.shape) == (torch.uint8, (len(kv), codec.nbytes))
    with_headroom = torch.zeros(len(kv), 128 + codec.nbytes, dtype=torch.uint8)[:, 128:].copy_(encoded)
    return codec.decode(with_headroom).view(kv.dtype).view(kv.shape)


@pytest.mark.parametrize(("form", "worst"), [("int8", 1 / 250), ("fp8", 1 / 27)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_of_a_value_is_a_small_part_of_the_largest_value_of_its_channel(
    form: str, worst: float, dtype: torch.dtype
) -> None:
    kv = make_kv(dtype)
    decoded = encode_and_decode(kv, form)
    assert decoded.dtype == dtype
    largest = kv.float().abs().amax(-2, keepdim=True)
    assert ((decoded.float() - kv.float()).abs() / largest).max() <= worst + torch.finfo(dtype).eps


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_zeros_are_exact_and_the_largest_value_does_not_overflow(form: str) -> None:
    kv = torch.zeros(SHAPE)
    kv[0, 0, 0, 0, 3] = torch.tensor([1e-40, 1e-30, 1.0, 1.00390625, 65504.0, 1e30, -1e30, -0.0])
    decoded = encode_and_decode(kv, form)
    assert torch.isfinite(decoded).all()
    torch.testing.assert_close(decoded, kv, rtol=0.01, atol=1e-36)


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 4 / (1 + 2 / 16)), (torch.bfloat16, 2 / (1 + 2 / 16))])
def test_a_block_has_one_byte_per_element_and_two_bytes_per_channel(dtype: torch.dtype, ratio: float) -> None:
    kv = make_kv(dtype)
    codec = choose_codec(quantised_namespace(NAMESPACE, "int8"), kv)
    assert codec is not None
    assert kv[0].nbytes / codec.nbytes == ratio


def test_blocks_without_quantisation_have_an_unchanged_namespace() -> None:
    assert quantised_namespace(NAMESPACE, "") == NAMESPACE
    assert choose_codec(NAMESPACE, make_kv()) is None
    assert len({quantised_namespace(NAMESPACE, form).digest for form in ("", "int8", "fp8")}) == 3


def test_only_instances_with_the_same_format_share_quantised_blocks(tiny_checkpoint: Path) -> None:
    store = MemoryStore(64 << 20)
    prompt = random.Random(3).choices(range(VOCAB_SIZE), k=65)
    loaded = {}
    for name, form in (("writer", "int8"), ("reader", "int8"), ("plain", ""), ("fp8", "fp8")):
        with Engine(tiny_checkpoint, store=FaultyStore(store), kv=form) as engine:
            submitted = engine.answer(prompt, 4)
            assert len(submitted.wait()) == 4
            loaded[name] = submitted.sequence.pool_cached_tokens
    assert loaded == {"writer": 0, "reader": 64, "plain": 0, "fp8": 0}


def test_an_instance_with_quantised_blocks_loads_no_plain_blocks_of_another_block_size(tiny_checkpoint: Path) -> None:
    store = MemoryStore(64 << 20)
    prompt = random.Random(4).choices(range(VOCAB_SIZE), k=129)
    with Engine(tiny_checkpoint, store=FaultyStore(store), block_size=32) as engine:
        expected = engine.answer(prompt, 4).wait()
    with Engine(tiny_checkpoint, store=FaultyStore(store), block_size=16, kv="int8") as engine:
        submitted = engine.answer(prompt, 4)
        assert submitted.wait() == expected
        assert submitted.sequence.pool_cached_tokens == 0
