"""To see a hit in the pool, the instances' own caches are emptied through the router."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.cluster import ask, instance, router
from tests.end_to_end.test_prefill_decode import conversation, text
from tests.support import plain_http
from tests.support.mooncake import MooncakeMaster
from tests.support.waiting import wait_until


def test_after_the_own_caches_are_cleared_the_same_prompt_comes_from_the_pool(
    tmp_path: Path, model: Path, mooncake_master: MooncakeMaster
) -> None:
    with (
        router(tmp_path, splitwise=False) as running_router,
        instance(tmp_path, model, "--router", f"127.0.0.1:{running_router.port}", master=mooncake_master) as mixed,
    ):
        running_router.wait_for(mixed=1)
        messages = conversation("cleared")
        first = ask(running_router.url, messages, max_tokens=10)
        mixed.wait_for_saves()
        again = ask(running_router.url, messages, max_tokens=10)["usage"]["prompt_tokens_details"]
        assert (again["own_cached_tokens"] > 0, again["pool_cached_tokens"]) == (True, 0)

        cleared = plain_http.post(f"{running_router.url}/admin/clear_prefix_cache")
        assert (cleared.status_code, cleared.json()["status"]) == (200, "success"), cleared.text

        request = {"request_id": "after-clearing"}
        after = ask(running_router.url, messages, max_tokens=10, **request)
        details = after["usage"]["prompt_tokens_details"]
        assert (details["own_cached_tokens"], details["pool_cached_tokens"] > 0) == (0, True)
        assert text(after) == text(first)
        log = tmp_path / f"log_{mixed.port}" / "api_server.log"
        line = wait_until(
            lambda: next((each for each in log.read_text().splitlines() if "request_id=after-clearing" in each), ""),
            "the request's line in the log",
        )
        assert f"storage_cache_token_num={details['pool_cached_tokens']}" in line
