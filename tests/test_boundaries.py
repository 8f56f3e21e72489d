"""The walls of the house, which pyproject.toml declares for import-linter and the source is read for here.

1. Only the store, the direct hand-over and the commands of kvstore import mooncake.
2. Only the engine and staging import torch; installing or starting the router brings none.
3. Only ``router/http`` speaks HTTP to instances.
4. A key's text is built and parsed in ``namespace.py``.
5. Configuration is read in ``config/``, ``settings/`` and ``args.py``.
6. Rooms depend downward.
7. Whoever catches every exception raises it again, logs it or counts it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvcommon", "router", "kvstore_backend", "engine")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}

FOREIGN = {
    "kvcommon": {"engine", "kvstore_backend", "mooncake", "router", "torch", "transformers"},
    "router": {"engine", "kvstore_backend", "mooncake", "torch", "transformers"},
    "kvstore_backend": {"engine", "router", "torch", "transformers"},
    "engine": {"router"},
}
HTTP_CLIENTS = {"httptools", "httpx", "aiohttp", "requests", "urllib", "http"}
# server.py reads with httptools what clients send. register.py, the sidecar for servers that cannot register
# themselves, and an operator's programs are none of the router's own process.
SPEAKERS = {
    *("router.http.exchange", "router.http.server", "router.register"),
    *("router.console.client", "router.console.dashboard.scraper"),
}
# 45 before there were workers: launch/, which was one file, has eight more, sharing/ and its use by app.py six, and the
# simulator, whose routers tell each other of loads and prompts by the real parts, three. Reading a request,
# once a part of serving/proxy.py, has one more as a file of its own; the dialects of pairs have eleven, as each reads
# what its instances registered and writes members of a body; the ways to resume a stream and to tell a request's story,
# once parts of it too, eight. An operator's programs have one each to the flags, and one to the settings.
# Discovery has three: it speaks to the API server through router/http, and reads its credentials as the settings do;
# the figure for autoscalers one, and the end of a router that says so first another. The attempts at a request, and the
# scan of a large body, once parts of serving/proxy.py, have one each; asking instances why a request was a miss
# has one, to router/http; the supervisor's clock, which is that of the probes of instances, one. The services of a
# request and the records of telemetry, once in other files, have four. The flight recorder has one, to the settings;
# the program that shows its files has two, to their reader and to the flags. The endpoint picker has eight, because it
# stands for the HTTP server; its program has one, to the flags; the attempts have one to the instances that a gateway
# may use. The KV events of instances have one, to the index of prefixes; the questions of other schedulers for blocks
# have two, to the names of blocks and to the errors that they are answered with. The sidecar has one more, to the
# question which engine a server runs; the failures of discovery's questions have one, to the errors of router/http.
MAX_ARROWS = 113
MAX_ENTRIES = 14

# Each reads it for a reason of its own: config/ and settings/ are the places for it; args.py sets a variable that
# torch's thread pool reads when it is loaded, and reads FastDeploy's.
READERS_OF_THE_ENVIRONMENT = ("kvstore_backend/config/", "router/settings/", "engine/args.py", "kvcommon/spans.py")


# Handlers of every exception that neither raise, nor log, nor count: by file and function, with the reason.
QUIET_HANDLERS: dict[tuple[str, str], str] = {
    ("kvstore_backend/cli/certify/cases.py", "_run"): "becomes a problem of the case",
    ("kvstore_backend/cli/certify/cases.py", "run"): "raised at the end of the block, and becomes a problem",
    ("kvstore_backend/cli/certify/command.py", "_run_cases"): "becomes a problem of the case",
    **{
        ("router/serving/proxy.py", function): "given to _end_after, which logs it"
        for function in ("start", "on_begun", "on_data", "_run")
    },
    ("router/fleet/kv_event_feed.py", "read_batches"): "raised again by follow, which runs as a task",
    ("router/serving/attempt.py", "on_data"): "given to the owner, whose _end_after logs it",
    ("engine/generation/choices.py", "_relay_pieces"): "queued, and raised by the reader of the queue",
    ("engine/model/model_runner.py", "try_out"): "becomes the reason of the ConfigError raised behind it",
    ("kvstore_backend/integrations/vllm/fields.py", "_find_default"): "becomes the default, which equals no value",
    ("kvstore_backend/threads.py", "do"): "given to the future, and raised by whoever waits for it",
    ("router/http/exchange.py", "_connect_and_send"): "fails the exchange, whose receiver gets it",
    ("kvstore_backend/staging/cuda.py", "_queue"): "kept, and raised by whoever waits for the end of the steps",
    ("kvstore_backend/staging/ring.py", "take"): "whoever began the copy gets it from the same event",
}


@functools.cache
def imports(*, for_types: bool) -> grimp.ImportGraph:
    """Who imports whom; ``for_types``: with imports that only a type checker sees."""
    return grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=not for_types, cache_dir=None
    )


def room(module: str) -> str:
    """The folder or file directly under ``router/`` that a module belongs to."""
    return module.split(".")[1]


def arrows_between_rooms() -> set[tuple[str, str]]:
    """The imports (importing module, imported one) of the router that cross from a room into another."""
    graph = imports(for_types=False)
    inside = [module for module in graph.modules if module.startswith("router.")]
    return {
        (module, imported)
        for module in inside
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.startswith("router.") and room(imported) != room(module)
    }


@pytest.fixture
def loggers_stay_on() -> Iterator[None]:
    """import-linter sets logging up for itself, which turns off every logger that there is."""
    found = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    on = [logger for logger in found if not logger.disabled]
    yield
    for logger in on:
        logger.disabled = False


@pytest.mark.usefixtures("loggers_stay_on")
def test_the_contracts_of_pyproject_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    status = lint_imports(str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_no_foreign_one_even_for_types(package: str) -> None:
    graph = imports(for_types=True)
    for module in graph.modules:
        if module.split(".")[0] == package:
            imported = {name.split(".")[0] for name in graph.find_modules_directly_imported_by(module)}
            allowed = {"torch"} if module.startswith("kvstore_backend.staging.") else set()
            assert not imported & FOREIGN[package] - allowed, module


def test_the_pool_is_loaded_without_torch() -> None:
    code = "import sys, kvstore_backend.transfers, kvstore_backend.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_only_the_http_room_speaks_http_even_for_types() -> None:
    graph = imports(for_types=True)
    for module in graph.modules:
        if module.split(".")[0] == "router" and module not in SPEAKERS:
            imported = {name.split(".")[0] for name in graph.find_modules_directly_imported_by(module)}
            assert not imported & HTTP_CLIENTS, module


def test_the_sidecar_is_no_part_of_the_router() -> None:
    assert imports(for_types=True).find_modules_that_directly_import("router.register") == set()


def test_the_routers_rooms_have_few_arrows_and_no_circle() -> None:
    arrows = arrows_between_rooms()
    assert len(arrows) <= MAX_ARROWS, sorted(arrows)
    rooms: dict[str, set[str]] = {}
    for module, imported in arrows:
        rooms.setdefault(room(module), set()).add(room(imported))
    graphlib.TopologicalSorter(rooms).prepare()  # raises CycleError


def test_the_router_has_few_rooms() -> None:
    entries = [path.name for path in (ROOT / "router").iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_the_engines_packages_have_no_cycle_even_for_types() -> None:
    graph = imports(for_types=True)
    inside = [module for module in graph.modules if module.startswith("engine.")]
    packages: dict[str, set[str]] = {}
    for module in inside:
        imported = {room(name) for name in graph.find_modules_directly_imported_by(module) if name in inside}
        packages.setdefault(room(module), set()).update(imported - {room(module)})
    graphlib.TopologicalSorter(packages).prepare()  # raises CycleError


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others_even_for_types(package: str) -> None:
    graph = imports(for_types=True)
    inside = {module for module in graph.modules if module.split(".")[0] == package}
    # A package's __init__ offers the names of its modules: what counts is that these do not import it.
    arrows = {module: graph.find_modules_directly_imported_by(module) & inside for module in inside}
    graphlib.TopologicalSorter(arrows).prepare()


def test_only_configuration_reads_the_environment() -> None:
    others = {path: tree for path, tree in TREES.items() if not path.startswith(READERS_OF_THE_ENVIRONMENT)}
    assert {path: lines for path, tree in others.items() if (lines := list(environment_reads(tree)))} == {}


def test_only_settings_of_the_router_mention_the_environment() -> None:
    others = [path for path in TEXTS if path.startswith("router/") and "/settings/" not in path]
    assert others
    assert [path for path in others if "environ" in TEXTS[path] or "getenv" in TEXTS[path]] == []


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """The lines at which a file touches the process's environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in names:
                yield node.lineno
            case ast.ImportFrom(module="os", names=imported) if {alias.name for alias in imported} & names:
                yield node.lineno


def test_only_namespace_knows_the_text_of_a_key() -> None:
    assert [path for path in TEXTS if "kv1" in TEXTS[path]] == ["kvstore_backend/namespace.py"]


def test_installing_the_router_brings_no_torch() -> None:
    required = importlib.metadata.requires("fastdeploy-kvstore") or []
    always = [line for line in required if "extra ==" not in line]
    assert always
    assert not [line for line in always if line.startswith(("torch", "mooncake", "transformers"))]


def test_starting_the_router_loads_no_torch_and_nothing_that_makes_spans() -> None:
    # FastAPI brings OpenTelemetry's interface, which does nothing by itself.
    heavy = "{'torch', 'mooncake', 'transformers', 'opentelemetry.sdk', 'opentelemetry.exporter'}"
    code = f"import router.launch.worker, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_exception_is_swallowed() -> None:
    quiet = {(path, function) for path, tree in TREES.items() for function, _ in find_quiet_handlers(tree)}
    assert not quiet - QUIET_HANDLERS.keys(), "raise it again, log or count it, or catch what you expect"


@pytest.mark.parametrize(
    ("handler", "is_quiet"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: g()", True),
        ("try: f()\nexcept (ValueError, BaseException) as exc: g(str(exc))", True),
        ("with contextlib.suppress(OSError, Exception): f()", True),
        ("try: f()\nexcept Exception:\n    def g(): raise", True),
        ("try: f()\nexcept ValueError: pass", False),
        ("try: f()\nexcept Exception: raise", False),
        ("try: f()\nexcept Exception as exc: raise Other() from exc", False),
        ("try: f()\nexcept Exception: _log.exception('it failed')", False),
        ("try: f()\nexcept Exception: metrics.count_failure()", False),
    ],
)
def test_a_handler_that_swallows_every_exception_is_found(handler: str, is_quiet: bool) -> None:
    assert bool(list(find_quiet_handlers(ast.parse(handler)))) is is_quiet


def find_quiet_handlers(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """Function and line of each handler of all exceptions that neither raises, nor logs, nor counts."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        match node:
            case ast.ExceptHandler(type=caught, body=body) if is_broad(caught) and not any(map(is_told, body)):
                yield function, node.lineno
            case ast.Call(func=ast.Attribute(attr="suppress") | ast.Name(id="suppress"), args=args):
                if any(map(is_broad, args)):
                    yield function, node.lineno
        yield from find_quiet_handlers(node, inside)


def is_broad(caught: ast.expr | None) -> bool:
    """Whether a handler of this catches every exception."""
    if isinstance(caught, ast.Tuple):
        return any(map(is_broad, caught.elts))
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def is_told(node: ast.AST) -> bool:
    """Whether code raises, logs or counts; functions that it only defines do not count."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return False
        case ast.Raise():
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="_log" | "log" | "logging" | "logger" | "_logger"))):
            return True
        case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("count_"):
            return True
    return any(map(is_told, ast.iter_child_nodes(node)))
