"""Test whether two instances that share a KV pool answer correctly while the pool fails."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from kvcommon.hints import suggest_name
from kvcommon.versions import find_version
from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.cli.certify.cases import Case, Result, Trial, list_cases
from kvstore_backend.cli.certify.instances import Instance
from kvstore_backend.cli.certify.isolation import ISOLATION_COLUMNS, Isolation, measure_isolation
from kvstore_backend.cli.certify.page import COLUMNS, describe_result, make_page
from kvstore_backend.cli.certify.processes import Program, find_free_ports, is_listening, run_once
from kvstore_backend.cli.certify.recipe import Change, Recipe, read_recipe, split_command
from kvstore_backend.cli.certify.tampering import Tampering, open_tampering
from kvstore_backend.cli.report import print_json, print_table, show_progress

__all__ = ["add_arguments", "run"]

_NUM_PROMPTS, _NUM_QUICK_PROMPTS = 20, 12
_NUM_SENT, _NUM_QUICK_SENT = 60, 12
"""Number of prompts that the first tenant sends with ``--isolation``: without ``--quick``, and with ``--quick``."""
_MAX_PORTS = 16
_PART_SECONDS = 120.0
_ANSWER_SECONDS, _POLL_SECONDS = 10.0, 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore certify``."""
    parser.add_argument("recipe", type=Path, help="YAML file that says how to start and break a pool and its instances")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a variable of the recipe"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="run only cases with this text in their names"
    )
    parser.add_argument("--quick", action="store_true", help=f"fewer cases, with {_NUM_QUICK_PROMPTS} prompts each")
    parser.add_argument("--list", action="store_true", help="print the names of the recipe's cases, and run none")
    parser.add_argument(
        "--isolation",
        action="store_true",
        help="run no cases; measure whether a client can learn what another client has sent, from times to first token",
    )
    parser.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="folder for files and logs (default: a temporary one)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the results as one HTML file, too")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Run the cases of a recipe and print their results; return the exit status, 0 if all cases are passed.

    Raises:
        ConfigError: the recipe or an argument cannot be used.
        StartFailed: a program of the recipe did not start.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup
            signal.signal(number, lambda *_: sys.exit(1))  # so that the programs of the recipe end, too
    if arguments.logs and arguments.logs.exists() and not arguments.logs.is_dir():
        raise ConfigError(f"--logs {arguments.logs} is not a folder")
    if arguments.logs:
        try:
            arguments.logs.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"--logs {arguments.logs} cannot be created: {exc.strerror}") from None
    with contextlib.ExitStack() as opened:
        folder = arguments.logs or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="certify-")))
        if arguments.html and not (arguments.html.parent.is_dir() and not arguments.html.is_dir()):
            raise ConfigError(f"--html {arguments.html} cannot be written: it must be a file in a folder that exists")
        variables = dict(map(_split_setting, arguments.set))
        recipe = read_recipe(arguments.recipe, variables, folder.resolve(), find_free_ports(_MAX_PORTS))
        cases = _choose_cases(recipe, arguments.only, is_quick=arguments.quick)
        if arguments.list:
            for case in cases:
                lack = case.lacks(recipe)
                print(f"{case.name} (not run: {lack})" if lack else case.name)
            return 0
        begun = time.time()
        results: Sequence[Result | Isolation]
        if arguments.isolation:
            results, server = _measure_isolation(recipe, folder, _NUM_QUICK_SENT if arguments.quick else _NUM_SENT)
            columns, lines = ISOLATION_COLUMNS, [(result.describe(), result.problems) for result in results]
        else:
            results, server = _run_cases(recipe, cases, folder, _NUM_QUICK_PROMPTS if arguments.quick else _NUM_PROMPTS)
            columns = COLUMNS
            lines = [(describe_result(each), [*filter(None, [each.skipped]), *each.problems]) for each in results]
    facts = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun)),
        "command": shlex.join(["kvstore", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.0f}",
        "versions": f"Python {platform.python_version()}, kvstore {find_version()}{server and f', instances {server}'}",
    }
    if arguments.json:
        print_json({"title": recipe.title, **facts, "cases": [asdict(result) for result in results]})
    else:
        print(recipe.title)
        print_table(columns, [cells for cells, _ in lines])
        for cells, reasons in lines:
            for reason in reasons:
                print(f"{cells[0]}: {reason}")
    if arguments.html:
        try:
            arguments.html.write_text(make_page(recipe.title, list(facts.items()), columns, lines), encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"--html {arguments.html} cannot be written: {exc.strerror}") from None
    if all(getattr(result, "skipped", "") for result in results):
        print("kvstore: no case was run, so nothing is certified; --list shows why", file=sys.stderr)
        return 1
    return 1 if any(result.problems for result in results) else 0


def _split_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set is {text!r}; it must be NAME=VALUE")
    return name, value


def _choose_cases(recipe: Recipe, only: Sequence[str], *, is_quick: bool) -> list[Case]:
    cases = [case for case in list_cases(recipe) if case.is_quick or not is_quick]
    for text in only:
        if not any(text in case.name for case in cases):
            raise ConfigError(
                f"--only is {text!r}, which is in no case's name{suggest_name(text, [case.name for case in cases])}"
            )
    return [case for case in cases if not only or any(text in case.name for text in only)]


def _run_cases(recipe: Recipe, cases: Sequence[Case], folder: Path, num_prompts: int) -> tuple[list[Result], str]:
    """Run cases; return their results, and the version of the instances."""
    results = []
    changes_values = any(case.changes_values and not case.lacks(recipe) for case in cases)
    with (
        show_progress(recipe.title, len(cases)) as tell,
        _start_parts(recipe, folder) as parts,
        contextlib.ExitStack() as running,
    ):
        unavailable = _check_pool_is_empty(recipe) if changes_values else None
        trial = running.enter_context(_start_instances(recipe, parts, folder, num_prompts))
        version = trial.plain.find_version()
        for number, case in enumerate(cases):
            tell(number, case.name)
            lack = case.lacks(recipe)
            if lack:
                results.append(Result(case.name, skipped=lack))
                continue
            try:
                trial.begin(case.name)
                if unavailable and case.changes_values:
                    raise unavailable
                case.run(trial)
            except Exception as exc:  # the other cases are still worth running
                trial.problems.append(f"the case was not finished: {type(exc).__name__}: {exc}")
            results.append(trial.finish())
            for problem in results[-1].problems:  # now, because the table comes only after all cases
                print(f"{case.name}: {problem}", file=sys.stderr, flush=True)
        tell(len(cases))
        return results, version


def _measure_isolation(recipe: Recipe, folder: Path, num_prompts: int) -> tuple[list[Isolation], str]:
    """Measure the isolation of tenants without and with salts; return both results, and the instances' version."""
    if recipe.router is None:
        raise ConfigError('--isolation needs a recipe with a "router"')
    results = []
    with show_progress(recipe.title, 2) as tell, _start_parts(recipe, folder), contextlib.ExitStack() as running:
        instances = [
            running.enter_context(_run_instance(recipe, name, recipe.instance.cache, {}, folder))
            for name in ("first", "second")
        ]
        for number, has_salts in enumerate((False, True)):
            tell(number, "one salt per API key" if has_salts else "no salts")
            ports = [instance.port for instance in instances]
            results.append(measure_isolation(recipe, recipe.router, ports, folder, num_prompts, has_salts=has_salts))
        tell(2)
        return results, instances[0].find_version()


@contextlib.contextmanager
def _start_parts(recipe: Recipe, folder: Path) -> Iterator[dict[str, Program]]:
    """Write the recipe's files, run its ``prepare``, and start its parts (programs of the pool) for the ``with`` block.

    The part ``joiner`` is not started, because a case starts it. Yields the parts by name.

    Raises:
        ConfigError: the pool is a folder that has files, which the cases would remove and damage.
    """
    if recipe.pool and "://" not in recipe.pool and any(path.is_file() for path in Path(recipe.pool).rglob("*")):
        raise ConfigError(
            f"pool is {recipe.pool!r}, a folder that has files; certify removes and damages all files in it, so it "
            "must be new or empty"
        )
    for name, text in recipe.files.items():
        (folder / name).write_text(text)
    for command in recipe.prepare:
        run_once(command, folder)
    with contextlib.ExitStack() as running:
        parts = {name: _make_part(recipe, name, folder) for name in recipe.parts}
        for name, part in parts.items():
            running.callback(part.stop)
            if name != "joiner":
                part.start()
        yield parts


@contextlib.contextmanager
def _start_instances(recipe: Recipe, parts: Mapping[str, Program], folder: Path, num_prompts: int) -> Iterator[Trial]:
    """Start two instances that share the pool and one without a cache, for the ``with`` block."""
    with contextlib.ExitStack() as running:
        names = {"first": recipe.instance.cache, "second": recipe.instance.cache, "plain": recipe.instance.plain}
        first, second, plain = (
            running.enter_context(_run_instance(recipe, name, cache, {}, folder)) for name, cache in names.items()
        )

        @contextlib.contextmanager
        def start_changed(change: Change) -> Iterator[tuple[Instance, Instance]]:
            cache = recipe.instance.cache if change.cache is None else change.cache
            with (
                _run_instance(recipe, "changed", cache, change.variables, folder) as changed,
                _run_instance(
                    recipe, "changed plain", recipe.instance.plain, change.variables, folder
                ) as changed_plain,
            ):
                yield changed, changed_plain

        @contextlib.contextmanager
        def start_part(name: str) -> Iterator[None]:
            parts[name].start()
            try:
                yield
            finally:
                parts[name].stop()

        tampering = partial(_open_tampering, recipe)
        yield Trial(recipe, parts, first, second, plain, tampering, start_changed, start_part, num_prompts)


def _check_pool_is_empty(recipe: Recipe) -> PoolUnavailable | None:
    """Check that a Mooncake pool is empty; return the error if its values cannot be listed.

    Raises:
        ConfigError: the pool has values, which the cases would remove and damage.
    """
    if "://" not in recipe.pool:
        return None  # ``_start_parts`` has checked the folder
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            with _open_tampering(recipe) as pool:
                count = pool.count_values()
            break
        except PoolUnavailable as exc:  # a master that was just started may not answer yet
            if time.monotonic() > deadline:
                return exc
            time.sleep(_POLL_SECONDS)
    if count:
        raise ConfigError(
            f"pool is {recipe.pool!r}, which has {count} values; certify removes and damages all values in it, so it "
            "must be new or empty"
        )
    return None


def _make_part(recipe: Recipe, name: str, folder: Path) -> Program:
    part = recipe.parts[name]
    return Program(name, part.command, part.environment, folder, partial(is_listening, part.port), _PART_SECONDS)


@contextlib.contextmanager
def _run_instance(
    recipe: Recipe, name: str, cache: str, variables: Mapping[str, str], folder: Path
) -> Iterator[Instance]:
    settings = recipe.instance
    (port,) = find_free_ports(1)
    known = {**{key: recipe.expand(value) for key, value in variables.items()}, "port": str(port)}
    known["cache"] = recipe.expand(cache, **known)
    command = split_command(recipe.expand(settings.command, **known))
    environment = {key: recipe.expand(value, **known) for key, value in settings.environment.items()}
    instance: Instance | None = None

    def is_ready() -> bool:
        return instance is not None and instance.is_ready(settings.ready)

    program = Program(name, command, environment, folder, is_ready, settings.start_seconds)
    answer_seconds = 2 * recipe.stall_seconds  # a longer wait would show nothing more
    instance = Instance(name, program, port, settings.hits, {"model": settings.model}, answer_seconds)
    try:
        program.start()
        yield instance
    finally:
        instance.close()
        program.stop()


@contextlib.contextmanager
def _open_tampering(recipe: Recipe) -> Iterator[Tampering]:
    pool = open_tampering(recipe.pool, recipe.pool_metrics)
    try:
        yield pool
    finally:
        pool.close()
