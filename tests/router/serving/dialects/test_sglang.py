"""SGLang's pairs in four APIs: both legs get the same bootstrap room, or one room for each prompt of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.router.serving.dialects.pair_fleet import PairFleet
from tests.router.stand_in import Received, Responder
from tests.support.strict_sglang import StrictSglang
from tests.support.toy_model import PATHS

StartPairs = Callable[..., PairFleet]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_each_request_has_its_own_bootstrap_room(start_pairs: StartPairs) -> None:
    fleet = start_pairs("sglang")
    for path in PATHS:
        fleet.check(path, path)
        fleet.check(path, f"{path} stream", stream=True)
    fleet.check(CHAT, "the client's own id", request_id="mine")
    assert isinstance(fleet.strict, StrictSglang)
    assert fleet.strict.violations == []
    assert fleet.strict.rooms_used == fleet.strict.transfers == 2 * len(PATHS) + 1


@pytest.mark.parametrize("prompts", [["a b", "c d e"], ["a b"], [[1, 2, 3], [4, 5]]])
def test_a_batch_has_a_bootstrap_room_for_each_prompt(start_pairs: StartPairs, prompts: list[object]) -> None:
    fleet = start_pairs("sglang")
    fleet.check(COMPLETIONS, 1, prompt=prompts)
    assert isinstance(fleet.strict, StrictSglang)
    assert (fleet.strict.violations, fleet.strict.rooms_used) == ([], len(prompts))


@pytest.mark.parametrize("prompt", ["a b", ["a b", "c d e"]])
def test_token_ids_that_sglang_ignores_add_no_bootstrap_rooms(start_pairs: StartPairs, prompt: object) -> None:
    fleet = start_pairs("sglang")
    fleet.check(COMPLETIONS, 1, prompt=prompt, prompt_token_ids=[[1], [2], [3]])
    assert isinstance(fleet.strict, StrictSglang)
    assert (fleet.strict.violations, fleet.strict.rooms_used) == ([], len(prompt) if isinstance(prompt, list) else 1)
    answer = fleet.ask(COMPLETIONS, 1, prompt=["a b", "c d e"], prompt_token_ids=[1], n=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_as_pair")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_several_choices_for_a_prompt_are_refused(start_pairs: StartPairs, path: str) -> None:
    fleet = start_pairs("sglang")
    answer = fleet.ask(path, 1, n=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_as_pair")
    assert "send n requests" in answer.json()["error"]["message"]
    assert not any(instance.received for instance in fleet.instances)


def test_the_loss_of_a_prefill_instance_does_not_exclude_decode(start_pairs: StartPairs) -> None:
    fleet = start_pairs("sglang", prefill=2)
    decode = fleet.of("decode")[0]
    normal = decode.behave

    async def behave(request: Received, respond: Responder) -> None:
        if len(decode.received) > 1:
            await normal(request, respond)
            return
        message = "Prefill transfer failed for request rank=0 KVTransferError(bootstrap_room=1)"
        await respond.answer(500, b'{"error": {"message": "%s", "code": 500}}' % message.encode())

    decode.behave = behave
    fleet.check(CHAT, 1)
    fleet.wait_for_end()
    assert fleet.strict.violations == []
