"""Registrations at a router that requires a token."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.end_to_end.cluster import Instance, instance, router
from tests.support import plain_http
from tests.support.waiting import wait_until


def is_refused(asking: Instance) -> bool:
    return "Cannot register" in asking.process.output


def test_an_instance_registers_with_the_routers_token_or_logs_the_reason(tmp_path: Path, model: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("# for instances\nsécret\n")
    wrong.write_text("other\n")
    with router(tmp_path, "--register-token-file", str(right), splitwise=False) as running_router:
        towards = ("--router", f"127.0.0.1:{running_router.port}")
        for flags, sentence in [
            ((), "it requires a token; give the file of the token with --router-token-file"),
            (("--router-token-file", str(wrong)), "the token in the file of --router-token-file is wrong"),
        ]:
            with instance(tmp_path, model, *towards, *flags) as refused:
                wait_until(partial(is_refused, refused), "the refusal")
                (told,) = [line for line in refused.process.output.splitlines() if "Cannot register" in line]
                assert sentence in told
                assert told in (tmp_path / f"log_{refused.port}" / "api_server.log").read_text().splitlines()
                assert "other" not in told
            assert plain_http.get(f"{running_router.url}/registered_number").json()["mixed"] == 0
        with instance(tmp_path, model, *towards, environ={"FD_ROUTER_TOKEN_FILE": str(right)}) as taken:
            running_router.wait_for(mixed=1)
            log = tmp_path / f"log_{taken.port}" / "api_server.log"
            wait_until(lambda: "Registered at router" in log.read_text(), "the registration in its log")
