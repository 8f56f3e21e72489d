"""A router with paused instances."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.end_to_end.cluster import Instance, Router, ask, instance, router
from tests.end_to_end.test_prefill_decode import conversation, text
from tests.support import plain_http
from tests.support.waiting import wait_until


def order(running: Instance, path: str) -> None:
    answer = plain_http.post(f"{running.url}{path}", timeout=100)
    assert (answer.status_code, answer.json()["status"]) == (200, "success"), answer.text


def wait_for_states(running: Router, states: list[str]) -> None:
    def list_states() -> list[str]:
        listed = plain_http.get(f"{running.url}/registered").json()
        return sorted(each["state"] for role in ("prefill", "decode", "mixed") for each in listed.get(role, []))

    wait_until(lambda: list_states() == sorted(states), f"the router to know {states}")


def count_requests(running: Instance) -> float:
    return running.metric("fastdeploy:prompt_tokens_total")


def test_no_request_is_sent_to_a_paused_instance_until_it_is_resumed(tmp_path: Path, model: Path) -> None:
    with ExitStack() as stack:
        front = stack.enter_context(router(tmp_path, splitwise=False))
        flags = ("--router", f"127.0.0.1:{front.port}")
        first, second = (stack.enter_context(instance(tmp_path, model, *flags)) for _ in range(2))
        front.wait_for(mixed=2)
        messages = conversation("paused")
        expected = text(ask(front.url, messages, max_tokens=8))
        for paused, other in ((first, second), (second, first)):
            order(paused, "/v1/pause")
            wait_for_states(front, ["healthy", "paused"])
            before = count_requests(paused), count_requests(other)
            for _ in range(4):
                assert text(ask(front.url, messages, max_tokens=8)) == expected
            assert count_requests(paused) == before[0]
            assert count_requests(other) > before[1]
            order(paused, "/v1/resume")
            wait_for_states(front, ["healthy", "healthy"])
