"""Each inside of uvicorn that the router borrows, by name: a uvicorn without one fails here, with a sentence."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import ModuleType

import pytest
import uvicorn
import uvicorn.protocols.http.flow_control
import uvicorn.protocols.http.httptools_impl
import uvicorn.server

import router.http.server
import router.launch.program
import router.launch.server
import router.launch.worker
from router.http.server import ClientRequest, RouterProtocol

IMPLEMENTATION = uvicorn.protocols.http.httptools_impl
FLOW = uvicorn.protocols.http.flow_control

# Methods that RouterProtocol overrides, so uvicorn must go on calling them; most also call uvicorn's own.
OVERRIDDEN = {
    "__init__",
    "_start_asgi_task",
    "connection_lost",
    "connection_made",
    "data_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
    "shutdown",
}
# Attributes of a connection that the router reads or sets.
ATTRIBUTES = {
    "config",
    "cycle",
    "expect_100_continue",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scheme",
    "tasks",
    "timeout_keep_alive",
    "transport",
    "url",
}
FLOW_CONTROL = {"pause_reading", "read_paused", "resume_reading", "write_paused"}
# Members of a request of uvicorn's own (the control plane's) that the router reads or sets.
CYCLE = {"disconnected", "more_body", "response_complete", "response_started"}
SERVER = {
    *("config", "handle_exit", "lifespan", "main_loop", "on_tick", "serve", "server_state", "should_exit", "shutdown"),
    *("started", "startup"),
}
SERVER_STATE = {"connections"}


def parse(source: object) -> ast.AST:
    assert isinstance(source, (type, ModuleType)) or callable(source)
    return ast.parse(textwrap.dedent(inspect.getsource(source)))


def attributes_of(tree: ast.AST, *owners: str) -> set[str]:
    """The attributes that are asked of these expressions."""
    return {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def assigned_to_self(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def members(kind: type) -> set[str]:
    """All that a class and its bases define, and that their methods assign to ``self``."""
    own = [each for each in inspect.getmro(kind) if each.__module__.startswith("uvicorn.")]
    return {name for each in own for name in (*vars(each), *assigned_to_self(parse(each)))}


def missing(where: str, wanted: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    for name in sorted(set(wanted) - set(found)):
        yield (
            f"uvicorn {uvicorn.__version__} has no {where}.{name} any more, which the router borrows: "
            "see how router/http/server.py and router/launch can do without, or lower uvicorn's upper bound"
        )


@pytest.mark.parametrize(
    ("where", "wanted", "found"),
    [
        ("HttpToolsProtocol", OVERRIDDEN | ATTRIBUTES, members(IMPLEMENTATION.HttpToolsProtocol)),
        ("RequestResponseCycle", CYCLE, members(IMPLEMENTATION.RequestResponseCycle)),
        ("FlowControl", FLOW_CONTROL, members(FLOW.FlowControl)),
        ("Server", SERVER, members(uvicorn.Server)),
        ("ServerState", SERVER_STATE, members(uvicorn.server.ServerState)),
        ("protocols.http.httptools_impl", {"STATUS_LINE"}, vars(IMPLEMENTATION)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_uvicorn_has_what_the_router_borrows(where: str, wanted: set[str], found: set[str]) -> None:
    lacking = list(missing(where, wanted, found))
    assert not lacking, "\n".join(lacking)


def test_uvicorn_calls_what_the_router_overrides() -> None:
    """What httptools and asyncio call apart, which they name themselves."""
    called = attributes_of(parse(IMPLEMENTATION.HttpToolsProtocol), "self")
    assert "_start_asgi_task" in called
    assert {"handle_exit", "main_loop", "shutdown"} <= attributes_of(parse(uvicorn.Server), "self")


def test_the_server_shuts_down_with_the_arguments_that_the_router_takes() -> None:
    taken = inspect.signature(uvicorn.Server.shutdown)
    assert list(taken.parameters) == ["self", "sockets"]
    assert list(inspect.signature(uvicorn.Server.handle_exit).parameters) == ["self", "sig", "frame"]
    assert list(inspect.signature(IMPLEMENTATION.HttpToolsProtocol._start_asgi_task).parameters)[1:] == ["cycle", "app"]


def test_statuses_have_their_line() -> None:
    assert IMPLEMENTATION.STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"


def test_the_pipeline_holds_requests_with_their_application() -> None:
    """The router reads its first item, and the first of that."""
    hints = inspect.get_annotations(IMPLEMENTATION.HttpToolsProtocol._start_asgi_task)
    assert set(hints) >= {"cycle", "app"}
    assert "self.pipeline.appendleft((self.cycle, app))" in inspect.getsource(
        IMPLEMENTATION.HttpToolsProtocol.on_headers_complete
    )


def test_all_that_the_router_borrows_of_a_connection_is_listed() -> None:
    tree = parse(RouterProtocol)
    theirs = members(IMPLEMENTATION.HttpToolsProtocol)
    own = set(vars(RouterProtocol)) | (assigned_to_self(tree) - theirs)
    module = parse(router.http.server)
    used = attributes_of(tree, "self") | attributes_of(module, "self._protocol") | attributes_of(tree, "super()")
    assert (used & theirs) - OVERRIDDEN == ATTRIBUTES
    overridden = {
        name for name in set(vars(RouterProtocol)) & theirs if name == "__init__" or not name.startswith("__")
    }
    assert overridden == OVERRIDDEN
    assert used - own - theirs == set(), "neither uvicorn nor RouterProtocol has these"


def test_all_that_the_router_borrows_of_the_flow_control_is_listed() -> None:
    assert attributes_of(parse(router.http.server), "self.flow", "self._protocol.flow") == FLOW_CONTROL | {"has_unread"}


def test_all_that_the_router_borrows_of_a_request_is_listed() -> None:
    """Requests of uvicorn's go through the same variables as the router's own, of which it reads more."""
    assert members(IMPLEMENTATION.RequestResponseCycle) >= CYCLE
    tree = parse(RouterProtocol)
    used = attributes_of(tree, "self.cycle", "request", "existing")
    assert used & members(IMPLEMENTATION.RequestResponseCycle) >= CYCLE


def test_all_that_the_router_borrows_of_the_server_is_listed() -> None:
    tree = ast.Module([parse(router.launch.server), parse(router.launch.worker), parse(router.launch.program)], [])  # type: ignore[list-item]
    theirs = members(uvicorn.Server)
    used = attributes_of(tree, "self", "server", "super()") | {"handle_exit", "main_loop", "shutdown"}
    theirs |= {"lifespan"}  # which it has once it serves
    assert (used & theirs) - {"__init__"} == SERVER
    assert attributes_of(tree, "self.server_state", "server.server_state") == SERVER_STATE


def test_a_request_has_all_that_uvicorn_asks_of_its_own() -> None:
    """In the methods that stay uvicorn's, and in those that the router calls with its own request."""
    stay = [
        method
        for name, method in vars(IMPLEMENTATION.HttpToolsProtocol).items()
        if inspect.isfunction(method) and name not in OVERRIDDEN - {"connection_lost", "shutdown"}
    ]
    asked = {name for method in stay for name in attributes_of(parse(method), "self.cycle")}
    assert asked >= {"disconnected", "keep_alive", "message_event", "response_complete"}
    lacking = [name for name in sorted(asked) if not hasattr(ClientRequest, name)]
    assert not lacking, f"uvicorn {uvicorn.__version__} asks {lacking} of a request, and ClientRequest has none"
