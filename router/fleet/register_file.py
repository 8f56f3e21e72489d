"""The register file: instances that the router knows from its start, in the format of FastDeploy's Go router::

    instances:
      - {role: prefill, host_ip: 127.0.0.1, port: 8097, connector_port: 8001, rdma_ports: [7100, "7101"],
         device_ids: [0, "1"], transfer_protocol: [ipc, rdma], metrics_port: 8003}

``role``, ``host_ip`` and ``port`` are required. Instances of other engines specify ``engine`` (vllm, sglang, openai),
and if needed ``kv_connector`` or ``bootstrap_port``. Numbers may be strings; lists may be strings with commas.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcommon.hints import list_unknown
from router.fleet.registration import Registration, RegistrationError
from router.fleet.registry import Registry
from router.settings import SettingsError, YamlFileError, read_yaml

__all__ = ["add_listed_instances", "read_register_file"]

_log = logging.getLogger("router.fleet.register_file")

_FIELDS = (
    *("role", "host_ip", "port", "metrics_port", "connector_port", "engine_worker_queue_port", "transfer_protocol"),
    *("rdma_ports", "device_ids", "tp_size", "version", "is_paused", "connected_decodes"),
    *("engine", "bootstrap_port", "kv_connector", "models", "max_num_seqs", "cache_salt"),
)


def read_register_file(path: Path) -> list[Registration]:
    """Return the registrations of the instances that the file lists.

    Raises:
        SettingsError: the file cannot be read, or an entry is invalid. The message names the entry and the field.
    """
    where = f"manager.register-path {path}"
    try:
        document = read_yaml(path)
    except YamlFileError as exc:
        raise SettingsError(f"{where}: {exc}") from exc
    if not isinstance(document, dict) or "instances" not in document:
        raise SettingsError(f"{where} must have 'instances:' with a list of instances under it")
    entries = document["instances"]
    if not isinstance(entries, list | None):
        raise SettingsError(f"{where}: instances is {entries!r}; it must be a list")
    _warn_of_unknown(document, where)
    registrations = [_parse_entry(entry, f"{where}: instances[{i}]") for i, entry in enumerate(entries or [])]
    _check_unique(registrations, where)
    return registrations


def add_listed_instances(registry: Registry, path: Path, now: float) -> None:
    """Add the instances that the file lists to ``registry``. They are probed like other instances, but never removed.

    Raises:
        SettingsError: the file cannot be read, an entry is invalid, or the router's mode does not accept a role.
    """
    for i, registration in enumerate(read_register_file(path)):
        try:
            registry.check_role(registration.role)
        except RegistrationError as exc:
            raise SettingsError(f"manager.register-path {path}: instances[{i}]: {exc}") from exc
        registry.add_known_instance(registration, now, permanent=True)


def _warn_of_unknown(document: dict[Any, Any], where: str) -> None:
    """Log all unknown names in one line. They are not errors, because FastDeploy's Go router ignores them, too."""
    fields = [name for entry in document["instances"] or [] if isinstance(entry, dict) for name in entry]
    unknown = dict.fromkeys(str(name) for name in fields if name not in _FIELDS)
    beside = [str(name) for name in document if name != "instances"]
    if unknown or beside:
        listed = list_unknown([*beside, *unknown], _FIELDS)
        _log.warning("%s: unknown fields of an instance have no effect: %s", where, listed)


def _parse_entry(entry: Any, where: str) -> Registration:
    if not isinstance(entry, dict):
        raise SettingsError(f"{where} is {entry!r}; it must have role, host_ip and port")
    try:
        return Registration.from_fields(entry)
    except RegistrationError as exc:
        raise SettingsError(f"{where}: {exc}") from exc


def _check_unique(registrations: Sequence[Registration], where: str) -> None:
    first: dict[str, int] = {}
    for i, registration in enumerate(registrations):
        if registration.key in first:
            raise SettingsError(
                f"{where}: instances[{i}] has the host_ip and port of instances[{first[registration.key]}], "
                f"{registration.key}; list each instance once"
            )
        first[registration.key] = i
