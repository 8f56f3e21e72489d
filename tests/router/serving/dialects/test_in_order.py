"""Pairs that share a pool: prefill generates one token, then decode answers, in four APIs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.router.serving.dialects.pair_fleet import PairFleet
from tests.support.strict_vllm import StrictVllm
from tests.support.toy_model import PATHS

StartPairs = Callable[..., PairFleet]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("dialect", ["kvstore", "openai"])
def test_decode_finds_the_blocks_of_prefill_in_the_pool(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect)
    for path in PATHS:
        fleet.check(path, path)
        fleet.check(path, f"{path} stream", stream=True)
    assert isinstance(fleet.strict, StrictVllm)
    assert (fleet.strict.violations, fleet.strict.transfers, fleet.strict.alone) == ([], 2 * len(PATHS), 0)
    assert len(fleet.of("prefill")[0].received) == len(fleet.of("decode")[0].received) == 2 * len(PATHS)


@pytest.mark.parametrize("dialect", ["kvstore", "openai"])
def test_prefill_gets_a_request_for_one_response_of_one_token(start_pairs: StartPairs, dialect: str) -> None:
    fleet = start_pairs(dialect)
    usage = {"include_usage": True}
    fleet.check(CHAT, 1, n=3, max_completion_tokens=4, min_tokens=2, stop=["x"], logprobs=True)
    fleet.check(CHAT, 2, stream=True, stream_options=usage, max_tokens=None, max_completion_tokens=4)
    fleet.check(CHAT, 3, max_tokens=None, max_completion_tokens=None)
    fleet.check(COMPLETIONS, 4, best_of=2, stop_token_ids=[7], stream=None)
    fleet.check("/v1/responses", 5, background=False, min_tokens=1)
    fleet.check(COMPLETIONS, 6, prompt=["a b", "c d"], n=2)
    fleet.check(COMPLETIONS, 7, prompt=[[1, 2, 3], [4, 5]])
    fleet.check(COMPLETIONS, 8, prompt=[1, 2, 3])
    assert fleet.strict.violations == []
    assert len(fleet.of("prefill")[0].received) == 8
