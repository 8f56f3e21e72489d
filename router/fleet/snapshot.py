"""Snapshot: a file with the instances and prefixes that a router knows, for its next start.

It contains the registrations, so that a restarted router probes its instances immediately instead of waiting for their
heartbeats, and the prefixes that policies expect in instances' caches. It is optional: a file that cannot be used is
ignored and logged.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson

from router.fleet.instance import Instance, Orders
from router.fleet.registration import Registration, RegistrationError, Role
from router.fleet.registry import Registry
from router.settings import SettingsError

__all__ = ["STALE_SECONDS", "PersistentPolicy", "Snapshot"]

_log = logging.getLogger("router.fleet.snapshot")

_FORMAT = "kvrouter snapshot 1"
# The document without its policies; and for each role the policy's name and the function that encodes its state.
_Contents = tuple[dict[str, Any], dict[str, tuple[str, Callable[[], bytes]]]]
# Boot time is monotonic across processes, but not across boots of the machine. This file identifies the boot.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# After this time, caches have changed, and ports may have been assigned to other processes.
STALE_SECONDS = 600.0
# Version of commands that were never given, or not shared with other routers.
_NO_VERSION = (0, "")


@runtime_checkable
class PersistentPolicy(Protocol):
    """A policy that stores its state across a restart."""

    def prepare_dump(self) -> Callable[[], bytes]:
        """Return a function that encodes the present state. It may take long, and may run in any thread."""

    def load_dump(self, data: bytes) -> None:
        """Load the state of another router's policy of the same name.

        Raises:
            ValueError: this policy cannot use ``data``; its own state is unchanged.
        """


class OrderVersions(Protocol):
    """Versions of the operator commands for each instance across all routers; see ``sharing/records.py``."""

    def find_orders_version(self, key: str) -> tuple[int, str]:
        """Return the version of the latest commands that were received or given; (0, "") if there were none."""

    def note_restored_orders(self, instance: Instance, version: tuple[int, str]) -> None:
        """Note that the restored commands of ``instance`` have this version."""


def read_boot_clock() -> tuple[str, float]:
    """Return the id of the machine's boot, ``""`` if the system does not report it, and the seconds since then."""
    try:
        return _BOOT_ID.read_text().strip(), time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return "", 0.0


class Snapshot:
    """The snapshot file of one router."""

    def __init__(
        self,
        path: Path,
        registry: Registry,
        policies: Mapping[Role, object],
        clock: Callable[[], float] = time.time,
        boot_clock: Callable[[], tuple[str, float]] = read_boot_clock,
        versions: OrderVersions | None = None,
    ) -> None:
        """
        Args:
            path: the file. A temporary file with the suffix ``.new`` is written first.
            policies: each role's policy; the state of each ``PersistentPolicy`` is stored.
            clock: seconds since the epoch, to compute the age of a file from another boot or another machine.
            boot_clock: as ``read_boot_clock``.
            versions: versions of the commands, if other routers or processes may have later ones than the file.

        Raises:
            SettingsError: the folder of the file does not exist, or the path is a folder.
        """
        if not path.parent.is_dir():
            raise SettingsError(f"manager.snapshot-path is {str(path)!r}, but there is no folder {path.parent}")
        if path.is_dir():
            raise SettingsError(f"manager.snapshot-path is {str(path)!r}, which is a folder; it must be a file")
        self._path = path
        self._registry = registry
        self._policies = policies
        self._clock = clock
        self._boot_clock = boot_clock
        self._versions = versions
        self._has_new_orders = asyncio.Event()
        registry.events.new_orders.subscribe(self._has_new_orders.set)
        # If ``keep_writing`` is cancelled, its write continues in its thread while ``save`` begins.
        self._one_at_a_time = threading.Lock()

    async def keep_writing(self, seconds: float) -> None:
        """Write the file every ``seconds``, and immediately after an operator command, until cancelled."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_new_orders.wait(), seconds)
            self._has_new_orders.clear()
            with self._log_failures():
                await asyncio.to_thread(self._write_file, self._gather_contents())

    def save(self) -> None:
        """Write the file now."""
        with self._log_failures():
            self._write_file(self._gather_contents())

    def restore(self, now: float) -> None:
        """Load the file's instances and policy states, if the file exists and is usable.

        Args:
            now: seconds of the monotonic clock of the registry's times.
        """
        try:
            document = self._read_file()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as exc:
            _log.warning("the snapshot %s is left aside: %s", self._path, exc)
            return
        for registration, entry in document["instances"]:
            self._restore_instance(registration, entry, now)
        for role, state in document["policies"].items():
            try:
                self._restore_policy(role, state)
            except Exception:  # the router must start with any content of the file
                _log.exception("what the snapshot %s has of the %s policy is left aside", self._path, role)
        _log.info("the snapshot %s gave back %d instances", self._path, len(document["instances"]))

    def _restore_instance(self, registration: Registration, entry: dict[str, Any], now: float) -> None:
        if registration.role not in self._registry.roles:
            return
        known = self._registry.get(registration.key)
        if known is None:
            if entry["permanent"]:
                return  # it was in the register file, but is not any more
            known = self._registry.add_known_instance(
                registration, now, permanent=False, has_heartbeat=entry["has_heartbeat"]
            )
        elif not known.permanent:
            return  # other routers have reported it, possibly with later commands
        known.set_models(entry["models"], -math.inf)
        self._restore_orders(known, entry)

    def _restore_orders(self, known: Instance, entry: dict[str, Any]) -> None:
        """Apply the file's commands, unless another router or process has reported later ones."""
        if self._versions is not None and self._versions.find_orders_version(known.key) > entry["ordered"]:
            return
        known.apply_orders(entry["orders"])
        if self._versions is not None and entry["ordered"] > _NO_VERSION:
            self._versions.note_restored_orders(known, entry["ordered"])

    def _restore_policy(self, role: str, state: dict[str, Any]) -> None:
        policy = self._policies.get(Role(role))
        if isinstance(policy, PersistentPolicy) and type(policy).__name__ == state["policy"]:
            try:
                policy.load_dump(state["data"])
            except ValueError as exc:
                _log.warning("what the snapshot %s has of the %s policy is left aside: %s", self._path, role, exc)

    def _gather_contents(self) -> _Contents:
        """Collect the file's contents. No requests are relayed until this returns."""
        boot, since_boot = self._boot_clock()
        document: dict[str, Any] = {
            "format": _FORMAT,
            "written_at": self._clock(),
            "boot": boot,
            "since_boot": since_boot,
            "splitwise": self._registry.splitwise,
            "instances": [
                {**_make_entry(instance), "ordered": self._find_version(instance.key)} for instance in self._registry
            ],
        }
        memories = {
            role.value: (type(policy).__name__, policy.prepare_dump())
            for role, policy in self._policies.items()
            if isinstance(policy, PersistentPolicy)
        }
        return document, memories

    def _find_version(self, key: str) -> tuple[int, str]:
        return _NO_VERSION if self._versions is None else self._versions.find_orders_version(key)

    @contextlib.contextmanager
    def _log_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            _log.warning("the snapshot %s cannot be written: %s", self._path, exc.strerror)
        except Exception:
            _log.exception("the snapshot %s cannot be written", self._path)

    def _write_file(self, contents: _Contents) -> None:
        with self._one_at_a_time:
            document, memories = contents
            document["policies"] = {
                role: {"policy": name, "data": base64.b64encode(encode()).decode()}
                for role, (name, encode) in memories.items()
            }
            new = self._path.with_name(self._path.name + ".new")
            try:
                new.unlink(missing_ok=True)
                _write_private(new, orjson.dumps(document))
                os.replace(new, self._path)
                _flush_folder(self._path.parent)
            except OSError:
                new.unlink(missing_ok=True)
                raise

    def _read_file(self) -> dict[str, Any]:
        """Read the file: registrations are parsed, the policies' data is decoded.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is unusable: damaged, too old, or written by a router of the other mode.
        """
        data = self._path.read_bytes()
        try:
            document: dict[str, Any] = orjson.loads(data)
            if document["format"] != _FORMAT:
                raise ValueError(f"its format is {document['format']!r}, not {_FORMAT!r}")
            age = self._measure_age(document)
            splitwise = document["splitwise"]
            document["instances"] = [
                (Registration.from_fields(entry["registration"]), _read_entry(entry)) for entry in document["instances"]
            ]
            document["policies"] = {
                Role(role).value: {"policy": state["policy"], "data": base64.b64decode(state["data"], validate=True)}
                for role, state in document["policies"].items()
            }
        except (orjson.JSONDecodeError, RegistrationError, KeyError, TypeError, AttributeError, binascii.Error) as exc:
            raise ValueError(f"it is damaged: {exc or type(exc).__name__}") from exc
        if not 0 <= age <= STALE_SECONDS:  # also rejects nan
            raise ValueError(f"it was written {age:.0f} s ago; it is used up to {STALE_SECONDS:.0f} s")
        if splitwise is not self._registry.splitwise:
            raise ValueError(f"it is of a router {'with' if splitwise else 'without'} --splitwise")
        return document

    def _measure_age(self, document: dict[str, Any]) -> float:
        """Return the seconds since the file was written. Clock changes have no effect, unless it rebooted."""
        boot, since_boot = self._boot_clock()
        if boot and document.get("boot") == boot:
            age: float = since_boot - document["since_boot"]
        else:
            age = self._clock() - document["written_at"]
        return age


def _write_private(path: Path, data: bytes) -> None:
    """Write a new file to the disk, readable only by this user. Do not follow a link that exists at this path.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush the entries of ``folder`` to the disk, so that a renaming survives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_entry(instance: Instance) -> dict[str, Any]:
    """Return the instance's record with the names that the file has for its parts."""
    record = instance.to_record()
    orders = record.pop("orders")
    return {"registration": record.pop("fields"), **record, "weight": orders.pop("share"), **orders}


def _read_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an instance's flags, models, commands and their version. Older files lack some of them."""
    weight = float(entry.get("weight", 1.0))
    if not 0 <= weight <= 1:
        raise ValueError(f"it is damaged: a weight is {weight}")
    models = entry.get("models")
    count, writer = entry.get("ordered", _NO_VERSION)
    if not isinstance(count, int) or not isinstance(writer, str):
        raise ValueError(f"it is damaged: a version of orders is {[count, writer]}")
    until_restart, paused = (bool(entry.get(name, False)) for name in ("until_restart", "paused"))
    return {
        **{name: bool(entry[name]) for name in ("has_heartbeat", "permanent")},
        "models": None if models is None else frozenset(map(str, models)),
        "orders": Orders(bool(entry["draining"]), until_restart, paused, weight),
        "ordered": (count, writer),
    }
