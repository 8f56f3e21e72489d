"""The router behaves as its table of routes says, for each path, method, spelling and kind of client."""

from __future__ import annotations

import http.client
import itertools
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route as StarletteRoute

from router.access import ROUTES, Access, Route, find_route
from router.http import CONTROL_BYTES
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import StandIn

ROOT = Path(__file__).parents[3]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
SECRETS = {
    "anonymous": "",
    "client": "sk-1",
    "other client": "sk-2",
    "admin": "s3cret",
    "instance": "t0ken",
    "wrong secret": "x",
}
CLIENTS = {"client", "other client"}
EVERYBODY = set(SECRETS)
FILES = {
    "api_keys_file": "alice: sk-1\nbob: sk-2\n",
    "admin_token_file": "s3cret\n",
    "register_token_file": "t0ken\n",
}

# The allowed roles, with keys and both tokens, and with only an admin token.
WITH_KEYS = {
    Access.OPEN: EVERYBODY,
    Access.CLIENT: CLIENTS,
    Access.CLIENT_OR_ADMIN: CLIENTS | {"admin"},
    Access.INSTANCE: {"instance", "admin"},
    Access.INSTANCE_IF_ADMIN: {"instance", "admin"},
    Access.ADMIN: {"admin"},
}
WITH_ADMIN_ALONE = {
    Access.OPEN: EVERYBODY,
    Access.CLIENT: EVERYBODY,
    Access.CLIENT_OR_ADMIN: EVERYBODY,
    Access.INSTANCE: {"admin"},
    Access.INSTANCE_IF_ADMIN: {"admin"},
    Access.ADMIN: {"admin"},
}

# Endpoints that control or inspect the servers of FastDeploy 2.6, vLLM 0.33 and SGLang 0.5.
CONTROL = (
    *("/v1/pause", "/v1/resume", "/v1/is_paused", "/v1/sleep", "/v1/wakeup", "/v1/update_weights"),
    *("/update_model_weight", "/clear_load_weight", "/rearrange_experts", "/get_per_expert_tokens_stats"),
    *("/ping", "/load"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/resume", "/sleep", "/wake_up", "/update_weights"),
    *(
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/collective_rpc",
        "/server_info",
        "/scale_elastic_ep",
        "/abort_requests",
    ),
    *("/start_profile", "/stop_profile", "/invocations", "/inference/v1/generate", "/release_kv_cache_memory"),
    *("/flush_cache", "/clear_prefix_cache", "/get_server_info", "/set_internal_state", "/update_weights_from_disk"),
    *(
        "/load_lora_adapter",
        "/abort_request",
        "/generate",
        "/encode",
        "/get_weights_by_name",
        "/v1/files",
        "/v1/nothing",
    ),
)


READ_NO_BODY = {"/admin/clear_prefix_cache"}
WITH_BODIES = sorted(
    {route.path for route in ROUTES if "POST" in route.methods and not route.is_forwarded} - READ_NO_BODY
)


class System(NamedTuple):
    """The router, an instance, and the allowed roles."""

    router: RouterUnderTest
    connection: http.client.HTTPConnection
    instance: StandIn
    allowed: dict[Access, set[str]]

    def ask(self, method: str, target: str, role: str, body: bytes = b"{}") -> int:
        """Send a request with an unchanged target, and return the status."""
        connection = self.connection
        connection.putrequest(method, target)
        if SECRETS[role]:
            connection.putheader("Authorization", f"Bearer {SECRETS[role]}")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        response.read()
        return response.status


@pytest.fixture(params=["keys and tokens", "an admin token alone"])
def system(
    request: pytest.FixtureRequest, make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> Iterator[System]:
    has_keys = request.param == "keys and tokens"
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    names = FILES if has_keys else ["admin_token_file"]
    router, instance = make_router(**{name: str(tmp_path / name) for name in names}), stand_in()
    headers = {"authorization": f"Bearer {SECRETS['instance' if has_keys else 'admin']}"}
    assert router.client.post("/register", json=instance.registration(), headers=headers).status_code == 200
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=20)
    yield System(router, connection, instance, WITH_KEYS if has_keys else WITH_ADMIN_ALONE)
    connection.close()


def example(route: Route) -> str:
    """Return a path that matches the route."""
    return (
        route.path.replace("{response_id}", "resp_a").replace("{model_id:path}", "m").replace("{request_id:path}", "r")
    )


def spellings(path: str) -> Iterator[str]:
    """Yield targets that a server between a client and an engine may treat as ``path``."""
    last = path.rpartition("/")[2]
    coded = "".join(f"%{ord(each):02x}" for each in last)
    for name in (
        f"%{ord(last[0]):02X}{last[1:]}",
        coded,
        coded.replace("%", "%25"),
        last.upper(),
        f"{last};x=1",
        f"{last}%00",
    ):
        yield path[: -len(last)] + name
    yield from (
        f"{path}/",
        f"/{path}",
        f"{path}//",
        f"{path}?x=1",
        f"{path}#x",
        f"{path}%2F",
        f"{path}%3Fx",
        f"/.{path}",
    )
    yield from (path.replace("/", "%2F"), f"/%2F{path[1:]}", path.replace("/", "\\"), path.replace("/", "%5C"))
    yield from (
        f"http://router{path}",
        f"/v1/responses/..{path}",
        f"/v1/responses/%2e%2e/..{path}",
        f"/tokenize/..{path}",
    )
    yield from (
        f"/v1/responses/a%2F..%2F..%2F..{path}",
        f"/v1/responses/%252e%252e{path}",
        f"/v1/chat/completions{path}",
    )
    yield from (f"/v1/responses/a%3F{path}", f"/v1/responses/a;{path}", f"/v1/models/..{path}", f"/health/..{path}")


def test_each_path_is_answered_as_the_table_says(system: System) -> None:
    """The status is right for each path, method and role. Instances get only requests that the table forwards."""
    for route in ROUTES:
        for method in METHODS:
            for role in SECRETS:
                system.instance.received.clear()
                status = system.ask(method, example(route), role)
                where = f"{role}: {method} {route.path} was answered with {status}"
                if role not in system.allowed[route.access]:
                    assert status == 401, where
                elif not route.takes(method):
                    assert status == 405, where
                else:
                    assert status not in (401, 405), where
                reached = [each.target for each in system.instance.received]
                is_answered_there = route.is_forwarded and status == 200
                if (
                    route.path != "/admin/clear_prefix_cache"
                ):  # for this path, the router itself sends requests to the engines
                    assert reached == ([example(route)] if is_answered_there else []), where
                if status in (401, 405):
                    assert reached == [], where


def test_no_request_reaches_an_engines_control_endpoints(system: System) -> None:
    other_spellings = [("client", target) for path in CONTROL for target in (path, *spellings(path))]
    for role, target in [*other_spellings, *(("admin", path) for path in CONTROL)]:
        for method in ("GET", "POST"):
            status = system.ask(method, target, role)
            assert status in (400, 401, 404, 405), f"{role}: {method} {target} was answered with {status}"
    assert [each.target for each in system.instance.received] == []
    assert system.instance.aborted == []


def test_another_spelling_of_a_path_is_treated_as_the_path_or_refused(system: System) -> None:
    for route in ROUTES:
        if not route.is_forwarded or "{" in route.path:
            continue
        for target in spellings(route.path):
            system.ask("POST", target, "client")
    for each in system.instance.received:
        path = urllib.parse.unquote(each.target.partition("?")[0])  # as an engine reads it
        found = find_route(path)
        assert found is not None, each.target
        assert found.is_forwarded, each.target


def test_the_table_has_exactly_the_paths_of_the_control_plane(make_router: MakeRouter) -> None:
    handled: dict[str, set[str]] = {}
    for route in make_router().app.control.routes:
        assert isinstance(route, APIRoute | StarletteRoute), f"{route} is of a kind that the table does not know"
        handled.setdefault(route.path, set()).update((route.methods or set()) - {"HEAD"})
    listed = {route.path: set(route.methods) for route in ROUTES if not route.is_forwarded}
    assert handled == listed, "router/access/routes.py must have every path of router/app.py, with its methods"


def test_a_handler_with_a_path_that_is_not_listed_is_not_called(make_router: MakeRouter) -> None:
    router = make_router()

    @router.app.control.get("/admin/unlisted")
    async def answer() -> str:
        return "reached"

    response = router.client.get("/admin/unlisted")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_path")
    assert "docs/operations/security.md lists its paths" in response.json()["error"]["message"]


def test_a_path_is_listed_once() -> None:
    paths = [route.path for route in ROUTES]
    assert len(paths) == len(set(paths))
    assert [find_route(example(route)) for route in ROUTES] == list(ROUTES)


def test_the_body_of_a_request_to_the_control_plane_is_bounded(system: System) -> None:
    """The limit applies to the announced length before the body is sent, and to the body while it is read."""
    connection = http.client.HTTPConnection("127.0.0.1", system.router.port, timeout=20)
    announced = (("Content-Length", str(CONTROL_BYTES + 1)), b"")
    chunks = b"".join(b"8000\r\n%b\r\n" % (b" " * 0x8000) for _ in range(33))
    ways = (announced, (("Transfer-Encoding", "chunked"), chunks))
    for path, (head, body) in itertools.product(WITH_BODIES, ways):
        connection.putrequest("POST", path)
        connection.putheader("Authorization", "Bearer s3cret")
        connection.putheader(*head)
        connection.endheaders(body)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
        connection.close()


def test_a_request_without_access_is_refused_before_the_body_is_sent(system: System) -> None:
    for route in ROUTES:
        if "POST" not in route.methods or route.is_forwarded or "anonymous" in system.allowed[route.access]:
            continue
        connection = http.client.HTTPConnection("127.0.0.1", system.router.port, timeout=20)
        connection.putrequest("POST", route.path)
        connection.putheader("Content-Length", "60000000")
        connection.endheaders()
        assert connection.getresponse().status == 401, route.path
        connection.close()


def test_the_operators_page_has_the_table() -> None:
    page = (ROOT / "docs" / "operations" / "security.md").read_text()
    for route in ROUTES:
        target = "an instance" if route.is_forwarded else "the router"
        line = f"| `{route.path}` | {', '.join(route.methods)} | {route.access.value} | {target} |"
        assert line in page.splitlines(), f"docs/operations/security.md lacks: {line}"
    lines = [line for line in page.splitlines() if line.endswith(("| an instance |", "| the router |"))]
    assert len(lines) == len(ROUTES), "docs/operations/security.md lists a path that the router does not have"
