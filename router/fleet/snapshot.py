"""Snapshot: a file with the instances and prefixes that a router knows, for its next start.

The file contains the registrations. So a restarted router probes its instances immediately, and does not wait for their
heartbeats. It also contains the state of policies: which prefixes the instances have in their caches. If the file
cannot be used, the router logs a warning and starts without it.
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
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson

from kvcommon.waiting import wait_for_event
from router.fleet.instance import Instance, Orders
from router.fleet.registration import Registration, RegistrationError, Role
from router.fleet.registry import Registry
from router.settings import SettingsError

__all__ = ["STALE_SECONDS", "PersistentPolicy", "Snapshot"]

_log = logging.getLogger("router.fleet.snapshot")

_FORMAT = "kvrouter snapshot 1"
_HEAD = b'{"format":"kvrouter snapshot '  # the beginning of each snapshot, of any version
# The document without the policies; and for each role the policy's name and a function that encodes its state.
_Contents = tuple[dict[str, Any], dict[str, tuple[str, Callable[[], bytes]]]]
# The time since boot is monotonic for all processes until the machine reboots. This file identifies the boot.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Age after which a snapshot is not used: caches have changed, and other processes may use the ports.
STALE_SECONDS = 600.0
# Version of operator commands that were never given, or were not shared with other routers.
_NO_VERSION = (0, "")


@runtime_checkable
class PersistentPolicy(Protocol):
    """A policy that stores its state in the snapshot."""

    def dump(self) -> bytes:
        """Encode the state of the policy. This runs in another thread, while the policy chooses instances."""

    def load_dump(self, data: bytes) -> None:
        """Load a state that ``dump`` of a policy with the same name has returned, such as before a restart.

        Raises:
            ValueError: ``data`` cannot be used. The state of this policy is unchanged.
        """


class OrderVersions(Protocol):
    """Finds and records the version of the latest operator commands for each instance.

    All processes and routers compare these versions (``sharing/records.py``).
    """

    def find_orders_version(self, key: str) -> tuple[int, str]:
        """Return the version of the latest commands for an instance; (0, "") if there were none."""

    def note_restored_orders(self, instance: Instance, version: tuple[int, str]) -> None:
        """Record that the commands of ``instance`` were restored from a snapshot, in which they have ``version``."""


def read_boot_clock() -> tuple[str, float]:
    """Return the id of the machine's boot and the seconds since then. The id is ``""`` if the system has none."""
    try:
        return _BOOT_ID.read_text().strip(), time.clock_gettime(time.CLOCK_BOOTTIME)
    except OSError:
        return "", 0.0


class Snapshot:
    """The file with a router's instances and the state of its policies, which the router restores after a restart."""

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
            registry: the instances to store and restore.
            policies: the policy of each role. The state of a ``PersistentPolicy`` is stored.
            clock: returns the seconds since the epoch, for the age of a file from another boot or another machine.
            boot_clock: like ``read_boot_clock``.
            versions: finds the versions of operator commands, because other processes may know later commands. None:
                the commands in the file are always applied.

        Raises:
            SettingsError: the folder of the file does not exist, or the path is a folder, a device or a pipe.
        """
        if not path.parent.is_dir():
            raise SettingsError(f"manager.snapshot-path is {str(path)!r}, but there is no folder {path.parent}")
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise SettingsError(f"manager.snapshot-path is {str(path)!r}, which is {kind}; it must be a file")
        self._path = path
        self._registry = registry
        self._policies = policies
        self._clock = clock
        self._boot_clock = boot_clock
        self._versions = versions
        self._has_new_orders = asyncio.Event()
        registry.events.new_orders.subscribe(self._has_new_orders.set)
        # If ``keep_writing`` is cancelled, its thread may still be writing when ``save`` begins.
        self._one_at_a_time = threading.Lock()

    async def keep_writing(self, seconds: float) -> None:
        """Write the file every ``seconds``, and at once after an operator command, until this task is cancelled."""
        while True:
            await wait_for_event(self._has_new_orders, seconds)
            self._has_new_orders.clear()
            with self._log_failures():
                await asyncio.to_thread(self._write_file, self._gather_contents())

    def save(self) -> None:
        """Write the file now."""
        with self._log_failures():
            self._write_file(self._gather_contents())

    def restore(self, now: float) -> None:
        """Load instances and policy states from the file, if it exists and can be used.

        Args:
            now: the present time, by the clock of the registry.
        """
        try:
            document = self._read_file()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as exc:
            aside = self._put_other_file_aside()
            renamed = f"; the file was renamed to {aside}" if aside else ""
            _log.warning("the router starts without the snapshot %s: %s%s", self._path, exc, renamed)
            return
        for registration, entry in document["instances"]:
            self._restore_instance(registration, entry, now)
        for role, state in document["policies"].items():
            try:
                self._restore_policy(role, state)
            except Exception:  # the router must start, whatever the file contains
                _log.exception(
                    "the %s policy starts without its state in the snapshot %s, after an error", role, self._path
                )
        _log.info("%d instances were read from the snapshot %s", len(document["instances"]), self._path)

    def _put_other_file_aside(self) -> Path | None:
        """Rename a file that no router has written, because the next snapshot would replace it; return the new path."""
        with contextlib.suppress(OSError):
            with self._path.open("rb") as file:
                head = file.read(len(_HEAD))
            if head and head != _HEAD:
                names = (f"{self._path.name}.other{number or ''}" for number in count())
                aside = next(path for path in map(self._path.with_name, names) if not path.exists())
                return self._path.rename(aside)
        return None

    def _restore_instance(self, registration: Registration, entry: dict[str, Any], now: float) -> None:
        if registration.role not in self._registry.roles:
            return
        known = self._registry.get(registration.key)
        if known is None:
            if entry["permanent"]:
                return  # the instance was removed from the register file
            known = self._registry.add_known_instance(
                registration, now, permanent=False, has_heartbeat=entry["has_heartbeat"]
            )
        elif not known.permanent:
            return  # other routers have reported the instance, possibly with later commands
        known.set_models(entry["models"], -math.inf)
        self._restore_orders(known, entry)

    def _restore_orders(self, known: Instance, entry: dict[str, Any]) -> None:
        """Apply the operator commands in the file, unless another router or process has reported later ones."""
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
                _log.warning("the %s policy starts without its state in the snapshot %s: %s", role, self._path, exc)

    def _gather_contents(self) -> _Contents:
        """Collect the contents of the file. The router serves no requests until this method returns."""
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
            role.value: (type(policy).__name__, policy.dump)
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
        """Read the file, parse the registrations, and decode the data of the policies.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, too old, or from a router with another mode.
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
            raise ValueError(f"it was written {age:.0f} s ago, and at most {STALE_SECONDS:.0f} s are allowed")
        if splitwise is not self._registry.splitwise:
            other, this = ("with", "without") if splitwise else ("without", "with")
            raise ValueError(f"a router {other} --splitwise has written it, but this router runs {this} --splitwise")
        return document

    def _measure_age(self, document: dict[str, Any]) -> float:
        """Return the seconds since the file was written.

        If the machine has not rebooted since then, a change of the system clock has no effect.
        """
        boot, since_boot = self._boot_clock()
        if boot and document.get("boot") == boot:
            age: float = since_boot - document["since_boot"]
        else:
            age = self._clock() - document["written_at"]
        return age


def _write_private(path: Path, data: bytes) -> None:
    """Write a new file, which only this user can read, and flush it to the disk. Fail if ``path`` is a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush the entries of ``folder`` to the disk, so that a renamed file survives a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_entry(instance: Instance) -> dict[str, Any]:
    """Return the entry of an instance in the file."""
    record = instance.to_record()
    orders = record.pop("orders")
    return {"registration": record.pop("fields"), **record, "weight": orders.pop("share"), **orders}


def _read_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an instance from its entry, without its registration. Older files lack some members."""
    weight = float(entry.get("weight", 1.0))
    if not 0 <= weight <= 1:
        raise ValueError(f"it is damaged: a weight is {weight}, which is not from 0 to 1")
    models = entry.get("models")
    count, writer = entry.get("ordered", _NO_VERSION)
    if not isinstance(count, int) or not isinstance(writer, str):
        raise ValueError(f"it is damaged: a version is {[count, writer]}, not a whole number and a text")
    until_restart, paused = (bool(entry.get(name, False)) for name in ("until_restart", "paused"))
    return {
        **{name: bool(entry[name]) for name in ("has_heartbeat", "permanent")},
        "models": None if models is None else frozenset(map(str, models)),
        "orders": Orders(bool(entry["draining"]), until_restart, paused, weight),
        "ordered": (count, writer),
    }
