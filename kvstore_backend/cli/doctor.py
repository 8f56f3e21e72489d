"""Find the faults of a pool and of its configuration, and print their remedies."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import httpx
import numpy as np

from kvcommon.formats import format_bytes
from kvstore_backend.backend import ConfigError, PoolUnavailable, Span, Status, StorageBackend
from kvstore_backend.cli import ascend, checks
from kvstore_backend.cli.ascend import context_cost, hccl_sizing, kv_bytes_per_token
from kvstore_backend.cli.report import Finding, fail, ok, print_findings, print_json, show_progress, warn
from kvstore_backend.config import (
    FileSettings,
    MemorySettings,
    MooncakeSettings,
    PoolConfig,
    describe_override,
    describe_unknown,
    read_config,
)
from kvstore_backend.integrations.mindie import find_mistakes, is_server_config, read_server
from kvstore_backend.namespace import Namespace
from kvstore_backend.pool import open_store
from kvstore_backend.pool_timing import Comparison, InstanceUnavailable, time_computing, time_loading
from kvstore_backend.stores.file.ledger import find_size
from kvstore_backend.stores.mooncake_admin import find_admin

__all__ = ["TRIAL_NAMESPACE", "add_arguments", "diagnose", "native_log_to", "run", "try_pool"]

# Tokens of the smallest usual block. A shorter hit is not possible.
_SMALLEST_BLOCK = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore doctor``."""
    parser.add_argument(
        "config", nargs="?", help="URL of the pool, or a configuration file of any engine; default: the environment"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="folder of the model's checkpoint")
    parser.add_argument(
        "--instance",
        metavar="URL",
        help="an idle instance with the checkpoint of --model, to compare loading from the pool with computing",
    )
    parser.add_argument(
        "--master-metrics", metavar="HOST:PORT", help="address of the master's metrics (its --metrics_port)"
    )
    parser.add_argument(
        "--cards",
        type=int,
        help="HCCL-based pools: number of cards or dies in the pool; without CONFIG, only memory sizes are computed",
    )
    parser.add_argument(
        "--memory-factor", type=float, default=0.92, help="HCCL-based pools: memory factor of the engine (default 0.92)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Check a pool and its configuration, and print the findings; return 0 if the pool can be used, otherwise 1."""
    logging.getLogger("kvstore_backend").setLevel(logging.CRITICAL)  # the findings contain the warnings of the log
    findings = list(diagnose(arguments))
    usable = all(finding.level != "fail" for finding in findings)
    is_tried = any(finding.subject == "trial" for finding in findings)
    if arguments.json:
        print_json({"usable": usable, "tried": is_tried, "findings": findings})
    else:
        print_findings(findings)
        print(_conclude(usable, is_tried, arguments))
    return 0 if usable else 1


def _conclude(usable: bool, is_tried: bool, arguments: argparse.Namespace) -> str:
    """Return the last line of the output: whether the pool can be used.

    ``is_tried`` says whether the pool was tried with a block.
    """
    if arguments.cards is not None and arguments.config is None:
        return f"a pool of these cards {'can' if usable else 'cannot'} be built; only memory sizes were computed"
    if usable and is_tried:
        return "the pool can be used"
    return "the pool cannot be used as configured"


def diagnose(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Run the checks that the arguments select; yield the findings in the order in which to repair the faults."""
    kv_bytes = None
    if arguments.model is not None:
        try:
            kv_bytes = kv_bytes_per_token(arguments.model)
        except ConfigError as exc:
            yield fail("model", str(exc), "give --model the folder of a checkpoint")
            return
        yield ok("model", f"{format_bytes(1000 * kv_bytes)} of KV per 1000 tokens")
    if arguments.config is None and arguments.cards is not None:
        yield from _size_links(arguments.cards, arguments.memory_factor, kv_bytes)
        return
    is_mindie = arguments.config is not None and is_server_config(arguments.config)
    if is_mindie:
        findings = list(_diagnose_mindie(Path(arguments.config), arguments, kv_bytes))
        yield from findings
        if any(finding.level == "fail" for finding in findings):
            return
    elif arguments.cards is not None:
        yield from _size_links(arguments.cards, arguments.memory_factor, kv_bytes)
    # MindIE's server reads only its files, not the environment.
    environ: dict[str, str] | None = {} if is_mindie else None
    try:
        config = read_config(arguments.config, environ=environ)
    except ConfigError as exc:
        yield fail("configuration", str(exc))
        return
    if config is None:
        yield fail("configuration", "the configuration turns the pool off", 'set "backend": "mooncake" in kvPoolConfig')
        return
    yield ok("configuration", _describe_config(config))
    if overridden := describe_override(arguments.config, environ=environ):
        yield warn(
            "configuration", overridden, "set MOONCAKE_PROTOCOL for every process of this machine that joins the pool"
        )
    if unknown := describe_unknown(arguments.config, environ=environ):
        yield warn("configuration", unknown, "correct the names of these keys, or remove them")
    if isinstance(config.fast, FileSettings):
        yield from checks.check_folder(config.fast)
    match config.store:
        case MooncakeSettings():
            yield from _diagnose_mooncake(config, config.store, kv_bytes, arguments, is_mindie)
        case FileSettings():
            yield from _diagnose_file(config, config.store, kv_bytes, arguments.instance)
        case MemorySettings():
            yield warn(
                "sharing",
                "a memory pool belongs to one process, so nothing is shared",
                "use mooncake, or a file pool for the processes of one machine",
            )
            yield from _try_and_compare(config, config, kv_bytes, arguments.instance)


def _size_links(cards: int, memory_factor: float, kv_bytes: int | None, cards_per_model: int = 1) -> Iterator[Finding]:
    """Report how much memory the links between a pool's cards take, and how many tokens of KV that costs."""
    findings = hccl_sizing(cards, memory_factor)
    yield from findings
    if all(finding.level != "fail" for finding in findings):
        yield from context_cost(cards, kv_bytes, cards_per_model)


def _diagnose_mindie(path: Path, arguments: argparse.Namespace, kv_bytes: int | None) -> Iterator[Finding]:
    """Report the mistakes in the ``config.json`` of a MindIE server, and the memory that its cards' links take."""
    mistakes = list(find_mistakes(path))
    yield from (fail("MindIE", each.text) if each.is_fatal else warn("MindIE", each.text) for each in mistakes)
    if any(mistake.is_fatal for mistake in mistakes):
        yield from ascend.check_machine(needs_buffers=True)
        return
    server = read_server(path)
    if server.pool is None:
        return
    yield ok("MindIE", f"MindIE's server would accept {path}: the prefix cache is on in every model")
    if kv_bytes is None and server.model is not None:
        with contextlib.suppress(ConfigError):  # the weights may be missing on this machine
            kv_bytes = kv_bytes_per_token(server.model)
    if arguments.cards is None and server.cards:
        yield warn(
            "cards",
            f"this server has {server.cards} cards, but every card of the pool is linked to every other card",
            "give --cards the number of cards in all servers of the pool",
        )
    if cards := arguments.cards if arguments.cards is not None else server.cards:
        yield from _size_links(cards, arguments.memory_factor, kv_bytes, server.cards_per_model)


def _diagnose_mooncake(
    config: PoolConfig,
    settings: MooncakeSettings,
    kv_bytes: int | None,
    arguments: argparse.Namespace,
    is_mindie: bool,
) -> Iterator[Finding]:
    found_master, address = checks.check_master(settings)
    findings = [
        *checks.check_library(settings),
        *checks.check_events(),
        *checks.check_protocol(settings),
        *(ascend.check_machine(needs_buffers=is_mindie) if settings.protocol == "ascend" else ()),
        *checks.check_hostname(settings),
        *checks.check_memory(settings),
        *checks.check_ssd(settings),
        found_master,
        *checks.check_metadata_server(settings),
    ]
    admin = find_admin(address, arguments.master_metrics) if address else None
    measured = settings
    try:
        if address:
            findings += checks.check_master_flags(admin, address)
        if admin is not None:
            findings += checks.check_tenants(settings, admin)
            if any(segment.capacity for segment in admin.list_segments()):
                # Loads are measured from the memory of other processes, because most hits are there.
                measured = replace(settings, global_segment_size=0)
        findings += [*checks.check_capacity(settings, admin, kv_bytes), *checks.check_sharing(settings, admin)]
    except (httpx.HTTPError, ValueError) as exc:
        text = f"the metrics and segments that the master reports cannot be read: {exc}"
        findings.append(warn("master's flags", text, "check that --master-metrics is this master's --metrics_port"))
    yield from findings
    if all(finding.level != "fail" for finding in findings):
        # The trial uses another SSD folder: a client that joins with a folder removes the files that another client is
        # writing there.
        with tempfile.TemporaryDirectory(prefix="kvstore-doctor-") as folder:
            tried, measured = (replace(each, ssd_offload_path=folder) for each in (settings, measured))
            yield from _try_and_compare(
                replace(config, store=tried), replace(config, store=measured), kv_bytes, arguments.instance
            )


def _diagnose_file(
    config: PoolConfig, settings: FileSettings, kv_bytes: int | None, instance: str | None
) -> Iterator[Finding]:
    findings = [*checks.check_folder(settings), *checks.check_capacity(settings, None, kv_bytes)]
    yield from findings
    if any(finding.level == "fail" for finding in findings):
        return
    if settings.path.exists():
        yield from _try_and_compare(config, config, kv_bytes, instance)
        return
    # The trial uses another folder in the same filesystem, because the configured path may be mistyped, and must not be
    # created.
    parent = next(each for each in settings.path.parents if each.exists())
    try:
        trial = tempfile.TemporaryDirectory(prefix=".kvstore-doctor-", dir=parent)
    except OSError as exc:
        yield fail("folder", f"no folder can be created in {parent}: {exc.strerror}", "name another folder")
        return
    with trial as folder:
        elsewhere = replace(config, store=replace(settings, path=Path(folder)))
        yield from _try_and_compare(elsewhere, elsewhere, kv_bytes, instance)


def _try_and_compare(
    config: PoolConfig, measured: PoolConfig, kv_bytes: int | None, instance: str | None
) -> Iterator[Finding]:
    """Try the pool of ``config``. If the trial succeeds and ``instance`` is given, compare loading with computing.

    ``measured`` is the configuration for the measured loads. It may differ from ``config``: this process then gives no
    memory to the pool, so that the loads come from other processes, as most hits do.
    """
    findings = try_pool(config)
    yield from findings
    if instance is None or any(finding.level == "fail" for finding in findings):
        return
    if kv_bytes is None:
        yield warn(
            "worth it",
            "loading cannot be compared with computing, because the size of the instance's KV is not known",
            "give --model the folder of the instance's checkpoint",
        )
        return
    url = instance if "://" in instance else f"http://{instance}"
    try:
        with tempfile.TemporaryFile() as log, native_log_to(log):
            loading = time_loading(measured, kv_bytes)
        yield _judge_pool(Comparison(*loading, time_computing(url)), kv_bytes)
    except (PoolUnavailable, InstanceUnavailable) as exc:
        text = f"loading could not be compared with computing: {exc}"
        yield warn("worth it", text, "try again, or leave out --instance")


def _judge_pool(comparison: Comparison, kv_bytes: int) -> Finding:
    """Return the finding about whether loading is faster than computing, with the times for 1000 tokens."""
    load, compute = comparison.seconds_to_load(1000), 1000 * comparison.compute_seconds
    text = (
        f"1000 tokens of KV ({format_bytes(1000 * kv_bytes)}) take {_format_ms(load)} to load, and this instance "
        f"{_format_ms(compute)} to compute"
    )
    least = comparison.least_tokens
    if least is None:
        return warn(
            "worth it",
            f"loading is slower than computing: {text}",
            "use a faster network or protocol, or smaller blocks (kv=int8); until then instances compute "
            "instead of loading",
        )
    faster = "every hit is faster" if least <= _SMALLEST_BLOCK else f"hits of {least} tokens or more are faster"
    return ok("worth it", f"{text}: {faster}")


def _format_ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _describe_config(config: PoolConfig) -> str:
    match config.store:
        case MooncakeSettings() as store:
            text = f"mooncake: master {store.master_server_addr}, metadata {store.metadata_server}, {store.protocol}"
        case FileSettings() as store:
            text = f"file: {store.path}, {format_bytes(find_size(store.path, store.size))}"
        case MemorySettings() as store:
            text = f"memory: {format_bytes(store.size)}"
    return f"{text}{', asynchronous writes' if config.async_write else ''}{', a fast tier' if config.fast else ''}"


TRIAL_NAMESPACE = Namespace("kvstore-doctor", "uint8", 1, 1, 1, 1, "bytes")
_BLOCK_BYTES = 64 << 10
_DEADLINE_SECONDS = 60.0
_STEPS = ("joining the pool", "put", "exists", "get", "remove")


def try_pool(config: PoolConfig) -> list[Finding]:
    """Put, look up, read and remove a block in a pool; return the findings, after a minute at the latest."""
    findings: list[Finding] = []
    steps: list[str] = []
    # A daemon thread, because a native call that never returns must not prevent the end of the process.
    thread = threading.Thread(target=lambda: findings.extend(_run_trial(config, steps.append)), daemon=True)
    with tempfile.TemporaryFile() as native_log:
        with native_log_to(native_log) as outside, show_progress("trial", len(_STEPS), outside) as tell:
            thread.start()
            give_up_at = time.monotonic() + _DEADLINE_SECONDS
            while True:
                thread.join(0.1)
                if steps:
                    tell(len(steps) - 1, steps[-1])
                if not thread.is_alive() or time.monotonic() >= give_up_at:
                    break
        native_log.seek(0)
        complaints = native_log.read().decode(errors="replace")
    if thread.is_alive():
        findings.append(
            fail("trial", f"the pool hangs: no answer within {_DEADLINE_SECONDS:.0f} s", "restart its master")
        )
    if any(finding.level == "fail" for finding in findings):
        sys.stderr.write(complaints)
    return findings


@contextlib.contextmanager
def native_log_to(file: IO[bytes]) -> Iterator[IO[str]]:
    """Redirect standard error to ``file`` for the ``with`` block; yield the original standard error.

    Mooncake's library writes to standard error also when there is no error.
    """
    sys.stderr.flush()
    outside = os.dup(2)
    os.dup2(file.fileno(), 2)
    with open(outside, "w") as before:
        try:
            yield before
        finally:
            os.dup2(outside, 2)


def _run_trial(config: PoolConfig, on_step: Callable[[str], None]) -> Iterator[Finding]:
    on_step(_STEPS[0])
    try:
        store = open_store(config)
    except PoolUnavailable as exc:
        yield fail("trial", str(exc))
        return
    try:
        yield _round_trip(store, on_step)
    finally:
        store.close()


def _round_trip(store: StorageBackend, on_step: Callable[[str], None]) -> Finding:
    source = np.frombuffer(os.urandom(_BLOCK_BYTES), dtype=np.uint8).copy()
    target = np.zeros_like(source)
    key = TRIAL_NAMESPACE.key(os.urandom(32))
    for memory in (source, target):
        store.register(memory.ctypes.data, memory.nbytes)
    try:
        on_step("put")
        if not store.put([key], [[Span(source.ctypes.data, source.nbytes)]])[0]:
            return fail(
                "trial",
                f"a block of {_BLOCK_BYTES >> 10} KiB could not be put",
                "all blocks in the pool are in use, no client gives it memory, or the master lists a dead client; "
                "kvstore stats shows which of these is true",
            )
        on_step("exists")
        found = store.exists([key])[0]
        on_step("get")
        read = store.get([key], [[Span(target.ctypes.data, target.nbytes)]])[0]
        on_step("remove")
        removed = store.remove([key], force=True)[0]
    finally:
        for memory in (source, target):
            store.unregister(memory.ctypes.data, memory.nbytes)
    if not found or not read:
        return fail(
            "trial",
            f"a block was put, but exists returned {found.value} and get returned {read.value}",
            "the client that has the block cannot be reached; check local_hostname, and firewalls between machines",
        )
    if not np.array_equal(source, target):
        return fail(
            "trial",
            "a block was read with other bytes than were stored",
            "do not use this pool; report the fault with the versions of Mooncake and of this project",
        )
    if removed is Status.FAILED:
        return fail(
            "trial", "the trial block was put, found and read, but could not be removed", "look at the master's log"
        )
    return ok("trial", f"a trial block of {_BLOCK_BYTES >> 10} KiB was put, found, read with equal bytes, and removed")
