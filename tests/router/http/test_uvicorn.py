"""The names of uvicorn's internals that the router uses: a uvicorn without one fails here with a clear message."""

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
SERVER_STATE = {"connections", "tasks"}


def parse(source: object) -> ast.AST:
    assert isinstance(source, (type, ModuleType)) or callable(source)
    return ast.parse(textwrap.dedent(inspect.getsource(source)))


def list_used(tree: ast.AST, *owners: str) -> set[str]:
    """Find the attributes that the code reads or sets of these expressions."""
    return {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


def find_assigned(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def list_members(kind: type) -> set[str]:
    """List the members that a class and its bases define or assign to ``self``."""
    own = [each for each in inspect.getmro(kind) if each.__module__.startswith("uvicorn.")]
    return {name for each in own for name in (*vars(each), *find_assigned(parse(each)))}


def describe_missing(where: str, wanted: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    for name in sorted(set(wanted) - set(found)):
        yield (
            f"uvicorn {uvicorn.__version__} has no {where}.{name} any more, which the router uses: "
            "see how router/http/server.py and router/launch can do without, or lower uvicorn's upper bound"
        )


@pytest.mark.parametrize(
    ("where", "wanted", "found"),
    [
        ("HttpToolsProtocol", OVERRIDDEN | ATTRIBUTES, list_members(IMPLEMENTATION.HttpToolsProtocol)),
        ("RequestResponseCycle", CYCLE, list_members(IMPLEMENTATION.RequestResponseCycle)),
        ("FlowControl", FLOW_CONTROL, list_members(FLOW.FlowControl)),
        ("Server", SERVER, list_members(uvicorn.Server)),
        ("ServerState", SERVER_STATE, list_members(uvicorn.server.ServerState)),
        ("protocols.http.httptools_impl", {"STATUS_LINE"}, vars(IMPLEMENTATION)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_uvicorn_has_the_internals_that_the_router_uses(where: str, wanted: set[str], found: set[str]) -> None:
    lacking = list(describe_missing(where, wanted, found))
    assert not lacking, "\n".join(lacking)


def test_uvicorn_calls_the_methods_that_the_router_overrides() -> None:
    """Check the methods that uvicorn calls; httptools and asyncio call the others."""
    called = list_used(parse(IMPLEMENTATION.HttpToolsProtocol), "self")
    assert "_start_asgi_task" in called
    assert {"handle_exit", "main_loop", "shutdown"} <= list_used(parse(uvicorn.Server), "self")


def test_uvicorn_passes_the_arguments_that_the_router_accepts() -> None:
    parameters = inspect.signature(uvicorn.Server.shutdown)
    assert list(parameters.parameters) == ["self", "sockets"]
    assert list(inspect.signature(uvicorn.Server.handle_exit).parameters) == ["self", "sig", "frame"]
    assert list(inspect.signature(IMPLEMENTATION.HttpToolsProtocol._start_asgi_task).parameters)[1:] == ["cycle", "app"]


def test_uvicorn_has_a_status_line() -> None:
    assert IMPLEMENTATION.STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"


def test_the_pipeline_holds_requests_with_their_application() -> None:
    """The router reads the pipeline's first item, and that item's first member."""
    hints = inspect.get_annotations(IMPLEMENTATION.HttpToolsProtocol._start_asgi_task)
    assert set(hints) >= {"cycle", "app"}
    assert "self.pipeline.appendleft((self.cycle, app))" in inspect.getsource(
        IMPLEMENTATION.HttpToolsProtocol.on_headers_complete
    )


def test_all_members_of_a_connection_that_the_router_uses_are_listed() -> None:
    tree = parse(RouterProtocol)
    theirs = list_members(IMPLEMENTATION.HttpToolsProtocol)
    own = set(vars(RouterProtocol)) | (find_assigned(tree) - theirs)
    module = parse(router.http.server)
    used = list_used(tree, "self") | list_used(module, "self._protocol") | list_used(tree, "super()")
    assert (used & theirs) - OVERRIDDEN == ATTRIBUTES
    overridden = {
        name for name in set(vars(RouterProtocol)) & theirs if name == "__init__" or not name.startswith("__")
    }
    assert overridden == OVERRIDDEN
    assert used - own - theirs == set(), "neither uvicorn nor RouterProtocol has these"


def test_all_members_of_the_flow_control_that_the_router_uses_are_listed() -> None:
    assert list_used(parse(router.http.server), "self.flow", "self._protocol.flow") == FLOW_CONTROL | {"has_unread"}


def test_all_members_of_a_request_that_the_router_uses_are_listed() -> None:
    """The same variables hold requests of uvicorn and of the router, and the router's have more members."""
    assert list_members(IMPLEMENTATION.RequestResponseCycle) >= CYCLE
    tree = parse(RouterProtocol)
    used = list_used(tree, "self.cycle", "request", "existing")
    assert used & list_members(IMPLEMENTATION.RequestResponseCycle) >= CYCLE


def test_all_members_of_the_server_that_the_router_uses_are_listed() -> None:
    tree = ast.Module([parse(router.launch.server), parse(router.launch.worker), parse(router.launch.program)], [])  # type: ignore[list-item]
    theirs = list_members(uvicorn.Server)
    used = list_used(tree, "self", "server", "super()") | {"handle_exit", "main_loop", "shutdown"}
    theirs |= {"lifespan"}  # set when the server starts
    assert (used & theirs) - {"__init__"} == SERVER
    assert list_used(tree, "self.server_state", "server.server_state") == SERVER_STATE


def test_the_routers_request_has_all_members_that_uvicorn_reads() -> None:
    """Check the methods that the router does not override, and those that it calls with its own request."""
    methods = [
        method
        for name, method in vars(IMPLEMENTATION.HttpToolsProtocol).items()
        if inspect.isfunction(method) and name not in OVERRIDDEN - {"connection_lost", "shutdown"}
    ]
    read = {name for method in methods for name in list_used(parse(method), "self.cycle")}
    assert read >= {"disconnected", "keep_alive", "message_event", "response_complete"}
    lacking = [name for name in sorted(read) if not hasattr(ClientRequest, name)]
    assert not lacking, f"uvicorn {uvicorn.__version__} reads {lacking} of a request, but ClientRequest has none"
