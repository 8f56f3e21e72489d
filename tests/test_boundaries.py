"""The rules for imports and dependencies. Some are contracts of import-linter in pyproject.toml.

1. Only the stores, the direct hand-over and the commands of kvstore import mooncake.
2. Only the engine and staging import torch. The router can be installed and started without it.
3. Only ``router/http`` sends HTTP requests to instances.
4. Only ``namespace.py`` builds and parses the text of a key.
5. Only ``config/``, ``settings/`` and ``args.py`` read the configuration.
6. Subpackages have no import cycles.
7. A handler of all exceptions raises them again, logs them or counts them.
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
# server.py parses the requests of clients with httptools. The modules outside router/http are in other programs.
HTTP_USERS = {
    *("router.http.exchange", "router.http.server", "router.register"),
    *("router.console.client", "router.console.dashboard.scraper"),
}
# Number of imports between the subpackages of the router. A change that needs more must say why.
MAX_CROSS_IMPORTS = 113
MAX_ENTRIES = 14

# args.py reads FastDeploy's variables, and sets one that torch reads when it is loaded.
READERS_OF_THE_ENVIRONMENT = ("kvstore_backend/config/", "router/settings/", "engine/args.py", "kvcommon/spans.py")


# Handlers of every exception that neither raise, nor log, nor count: by file and function, with the reason.
QUIET_HANDLERS: dict[tuple[str, str], str] = {
    ("kvstore_backend/cli/certify/cases.py", "_run"): "reported as a problem of the case",
    ("kvstore_backend/cli/certify/cases.py", "run"): "raised at the end of the block, then reported",
    ("kvstore_backend/cli/certify/command.py", "_run_cases"): "reported as a problem of the case",
    **{
        ("router/serving/proxy.py", function): "passed to _end_after, which logs it"
        for function in ("start", "on_begun", "on_data", "_run")
    },
    ("router/fleet/kv_event_feed.py", "read_batches"): "raised again by follow, which runs as a task",
    ("router/serving/attempt.py", "on_data"): "passed to the owner, and its _end_after logs it",
    ("engine/generation/choices.py", "_relay_pieces"): "queued, and raised by the reader of the queue",
    ("engine/model/model_runner.py", "try_out"): "the reason of a ConfigError that is raised later",
    (
        "kvstore_backend/integrations/vllm/fields.py",
        "_find_default",
    ): "the result is an object that equals no value",
    ("kvstore_backend/threads.py", "do"): "stored in the future, and raised by its reader",
    ("router/http/exchange.py", "_connect_and_send"): "the receiver of the exchange gets it",
    ("kvstore_backend/staging/cuda.py", "_queue"): "stored, and raised by the wait for the end of the steps",
    ("kvstore_backend/staging/ring.py", "take"): "the caller gets it from the event of its copy",
}


@functools.cache
def imports(*, for_types: bool) -> grimp.ImportGraph:
    """Return the graph of imports; with ``for_types``, also of those that only a type checker reads."""
    return grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=not for_types, cache_dir=None
    )


def subpackage(module: str) -> str:
    """Return the name of the folder or file directly in its package that a module belongs to."""
    return module.split(".")[1]


def list_cross_imports() -> set[tuple[str, str]]:
    """Return the imports between subpackages of the router: the importing module, and the imported one."""
    graph = imports(for_types=False)
    inside = [module for module in graph.modules if module.startswith("router.")]
    return {
        (module, imported)
        for module in inside
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.startswith("router.") and subpackage(imported) != subpackage(module)
    }


@pytest.fixture
def preserved_loggers() -> Iterator[None]:
    """Enable all loggers again after the test, because import-linter disables them."""
    found = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    on = [logger for logger in found if not logger.disabled]
    yield
    for logger in on:
        logger.disabled = False


@pytest.mark.usefixtures("preserved_loggers")
def test_the_code_meets_the_contracts_in_pyproject_toml(capsys: pytest.CaptureFixture[str]) -> None:
    status = lint_imports(str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_does_not_import_a_forbidden_package(package: str) -> None:
    graph = imports(for_types=True)
    for module in graph.modules:
        if module.split(".")[0] == package:
            imported = {name.split(".")[0] for name in graph.find_modules_directly_imported_by(module)}
            allowed = {"torch"} if module.startswith("kvstore_backend.staging.") else set()
            assert not imported & FOREIGN[package] - allowed, module


def test_the_storage_backend_is_imported_without_torch() -> None:
    code = "import sys, kvstore_backend.transfers, kvstore_backend.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_only_router_http_imports_http_clients() -> None:
    graph = imports(for_types=True)
    for module in graph.modules:
        if module.split(".")[0] == "router" and module not in HTTP_USERS:
            imported = {name.split(".")[0] for name in graph.find_modules_directly_imported_by(module)}
            assert not imported & HTTP_CLIENTS, module


def test_the_router_does_not_import_its_sidecar() -> None:
    assert imports(for_types=True).find_modules_that_directly_import("router.register") == set()


def test_the_subpackages_of_the_router_have_few_imports_between_them_and_no_cycle() -> None:
    cross_imports = list_cross_imports()
    assert len(cross_imports) <= MAX_CROSS_IMPORTS, sorted(cross_imports)
    graph: dict[str, set[str]] = {}
    for module, imported in cross_imports:
        graph.setdefault(subpackage(module), set()).add(subpackage(imported))
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_router_has_few_subpackages() -> None:
    entries = [path.name for path in (ROOT / "router").iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


def test_the_subpackages_of_the_engine_have_no_import_cycle() -> None:
    graph = imports(for_types=True)
    inside = [module for module in graph.modules if module.startswith("engine.")]
    packages: dict[str, set[str]] = {}
    for module in inside:
        imported = {subpackage(name) for name in graph.find_modules_directly_imported_by(module) if name in inside}
        packages.setdefault(subpackage(module), set()).update(imported - {subpackage(module)})
    graphlib.TopologicalSorter(packages).prepare()  # raises CycleError


@pytest.mark.parametrize("package", PACKAGES)
def test_the_modules_of_a_package_have_no_import_cycle(package: str) -> None:
    graph = imports(for_types=True)
    inside = {module for module in graph.modules if module.split(".")[0] == package}
    # A package's __init__ imports its modules, so a module that imports the package would be a cycle.
    imported = {module: graph.find_modules_directly_imported_by(module) & inside for module in inside}
    graphlib.TopologicalSorter(imported).prepare()


def test_only_the_configuration_modules_read_the_environment() -> None:
    others = {path: tree for path, tree in TREES.items() if not path.startswith(READERS_OF_THE_ENVIRONMENT)}
    assert {path: lines for path, tree in others.items() if (lines := list(find_environment_uses(tree)))} == {}


def test_only_settings_of_the_router_mention_the_environment() -> None:
    others = [path for path in TEXTS if path.startswith("router/") and "/settings/" not in path]
    assert others
    assert [path for path in others if "environ" in TEXTS[path] or "getenv" in TEXTS[path]] == []


def find_environment_uses(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of a file that use the process's environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in names:
                yield node.lineno
            case ast.ImportFrom(module="os", names=imported) if {alias.name for alias in imported} & names:
                yield node.lineno


def test_only_the_namespace_module_has_the_text_of_a_key() -> None:
    assert [path for path in TEXTS if "kv1" in TEXTS[path]] == ["kvstore_backend/namespace.py"]


def test_an_installation_of_the_router_does_not_need_torch() -> None:
    required = importlib.metadata.requires("fastdeploy-kvstore") or []
    always = [line for line in required if "extra ==" not in line]
    assert always
    assert not [line for line in always if line.startswith(("torch", "mooncake", "transformers"))]


def test_a_start_of_the_router_imports_neither_torch_nor_the_sdk_of_opentelemetry() -> None:
    # FastAPI imports the API of OpenTelemetry, which does nothing without its SDK.
    heavy = "{'torch', 'mooncake', 'transformers', 'opentelemetry.sdk', 'opentelemetry.exporter'}"
    code = f"import router.launch.worker, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_handler_hides_all_exceptions() -> None:
    quiet = {(path, function) for path, tree in TREES.items() for function, _ in find_quiet_handlers(tree)}
    assert not quiet - QUIET_HANDLERS.keys(), "raise the exception again, log or count it, or catch only some kinds"


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
def test_a_handler_that_hides_all_exceptions_is_found(handler: str, is_quiet: bool) -> None:
    assert bool(list(find_quiet_handlers(ast.parse(handler)))) is is_quiet


def find_quiet_handlers(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """Yield the function and the line of each handler of all exceptions that neither raises, nor logs, nor counts."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        match node:
            case ast.ExceptHandler(type=caught, body=body) if is_broad(caught) and not any(map(is_reported, body)):
                yield function, node.lineno
            case ast.Call(func=ast.Attribute(attr="suppress") | ast.Name(id="suppress"), args=args):
                if any(map(is_broad, args)):
                    yield function, node.lineno
        yield from find_quiet_handlers(node, inside)


def is_broad(caught: ast.expr | None) -> bool:
    """Return whether an ``except`` clause catches every exception."""
    if isinstance(caught, ast.Tuple):
        return any(map(is_broad, caught.elts))
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def is_reported(node: ast.AST) -> bool:
    """Return whether code raises, logs or counts. The bodies of functions that it only defines do not count."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            return False
        case ast.Raise():
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="_log" | "log" | "logging" | "logger" | "_logger"))):
            return True
        case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("count_"):
            return True
    return any(map(is_reported, ast.iter_child_nodes(node)))
