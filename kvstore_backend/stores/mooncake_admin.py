"""Reads a Mooncake master's HTTP interface (at its ``--metrics_port``), and lists the masters in etcd."""

from __future__ import annotations

import base64
import errno
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from kvcommon.mooncake import Segment, parse_plain_metrics, read_segment

__all__ = ["MasterAdmin", "Segment", "TenantAccount", "find_admin", "find_ended_clients", "list_clusters_in_etcd"]

_TIMEOUT_SECONDS = 2.0
# FastDeploy runs a master on 15001 with metrics on 15003; Mooncake's own default for metrics is 9003.
_METRICS_OFFSET = 2
_MOONCAKE_METRICS_PORT = 9003
_MAX_PROBES = 32
# Maximum number of keys in one query, because the keys are part of the URL.
_MAX_KEYS = 100
_NOBODY_LISTENS = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EHOSTDOWN)
_VIEW_PREFIX = "mooncake-store/"


@dataclass(frozen=True)
class TenantAccount:
    """Memory of the pool for one tenant: its limit, its use, its evictions and its refused writes.

    Attributes:
        name: name of the tenant, as its clients configure it.
        quota: configured limit in bytes.
        granted: limit that the master enforces now, in bytes. If all quotas together exceed the pool, the master
            reduces each of them in proportion.
        used: bytes of the tenant's blocks now.
        evicted: bytes of the tenant's blocks that were evicted to make space for its later blocks, in total.
        refused: number of the tenant's writes that failed because its limit was reached.
    """

    name: str
    quota: int
    granted: int
    used: int
    evicted: int
    refused: int


class MasterAdmin:
    """Client of one Mooncake master's HTTP interface.

    The methods raise ``httpx.HTTPError`` if the master cannot be reached or reports an error, and ``ValueError`` if the
    response is not from a Mooncake master.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def fetch_health(self) -> dict[str, Any]:
        """Return the master's state: ``role``, ``ha_state``, ``service_ready`` and ``leader_address``."""
        health = self._fetch_page("/health").json()
        if not isinstance(health, dict) or "role" not in health:
            raise ValueError(f"the response of {self.address}/health is not from a Mooncake master")
        return health

    def fetch_metrics(self) -> dict[str, float]:
        """Return the master's metrics that have no labels, by name."""
        return parse_plain_metrics(self._fetch_page("/metrics").text)

    def list_segments(self) -> list[Segment]:
        """Return the memory segments of the pool, as the master lists them."""
        page = self._fetch_page("/get_segments_detail").json()
        try:
            return [read_segment(each) for each in page["segments"]]
        except (KeyError, TypeError) as exc:
            raise ValueError(f"the response of {self.address}/get_segments_detail lacks the member {exc}") from exc

    def stream_keys(self) -> Iterator[str]:
        """Yield all keys of the tenant ``default`` in the pool, as the master lists them."""
        with httpx.stream("GET", f"http://{self.address}/get_all_keys", timeout=30, trust_env=False) as response:
            response.raise_for_status()
            yield from filter(None, response.iter_lines())

    def fetch_sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Return the size in bytes of each key's value, in the tenant ``default``; None if the master reports no size.

        Unlike a client's query, this query grants no lease.
        """
        sizes: list[int | None] = []
        for first in range(0, len(keys), _MAX_KEYS):
            asked = keys[first : first + _MAX_KEYS]
            found = self._fetch_page("/batch_query_keys", keys=",".join(asked)).json()["data"]
            sizes += [_size_of_value(found.get(key)) for key in asked]
        return sizes

    def fetch_accounts(self) -> list[TenantAccount]:
        """Return the tenants that have a quota or use memory; an empty list if the master does not separate tenants."""
        response = self._request_quotas()
        # 409: the master has no tenants; 404: the master's version does not know tenants.
        if response.status_code in (httpx.codes.CONFLICT, httpx.codes.NOT_FOUND):
            return []
        accounts = response.raise_for_status().json()["data"]
        labelled = self._fetch_labelled_metrics()
        try:
            return [_read_account(each, labelled) for each in accounts]
        except (KeyError, TypeError) as exc:
            raise ValueError(f"the response of {self.address}/api/v1/tenant_quotas lacks the member {exc}") from exc

    def has_tenants(self) -> bool:
        """Return whether the master separates tenants (``--enable_multi_tenants``)."""
        return self._request_quotas().status_code == httpx.codes.OK

    def _request_quotas(self) -> httpx.Response:
        url = f"http://{self.address}/api/v1/tenant_quotas"
        return httpx.get(url, timeout=_TIMEOUT_SECONDS, trust_env=False)

    def _fetch_labelled_metrics(self) -> list[tuple[str, float]]:
        """Return the master's metrics that have labels: each as a text with name and labels, and the value."""
        lines = (line.rpartition(" ") for line in self._fetch_page("/metrics").text.splitlines() if "{" in line)
        return [(name, float(value)) for name, _, value in lines if not name.startswith("#")]

    def _fetch_page(self, path: str, **params: str) -> httpx.Response:
        url = f"http://{self.address}{path}"
        return httpx.get(url, params=params, timeout=_TIMEOUT_SECONDS, trust_env=False).raise_for_status()


def _size_of_value(entry: dict[str, Any] | None) -> int | None:
    """Return the size in bytes of a value's first copy, from an entry of ``/batch_query_keys``."""
    if not entry or not entry.get("ok"):
        return None
    in_memory, on_disk = entry.get("values") or [], entry.get("local_disk_values") or entry.get("disk_values") or []
    if in_memory:
        return int(in_memory[0]["size_"])
    return int(on_disk[0]["object_size"]) if on_disk else None


def _read_account(entry: dict[str, Any], labelled: Sequence[tuple[str, float]]) -> TenantAccount:
    label = f'tenant_id="{entry["tenant_id"]}"'

    def add_up(metric: str) -> int:
        return int(sum(value for name, value in labelled if name.startswith(metric + "{") and label in name))

    return TenantAccount(
        entry["tenant_id"],
        quota=int(entry["requested_quota_bytes"]),
        granted=int(entry["effective_quota_bytes"]),
        used=int(entry["charged_bytes"]),
        evicted=add_up("mooncake_tenant_evict_bytes_total"),
        refused=add_up("mooncake_tenant_quota_reject_total"),
    )


def find_admin(master: str, given: str | None = None) -> MasterAdmin | None:
    """Return a client of the HTTP interface of the master at ``host:port``; None if no such interface answers.

    Args:
        master: address of the master for clients.
        given: address of the HTTP interface, or None to try the usual ports on the master's host.
    """
    host, _, port = master.rpartition(":")
    usual = [f"{host}:{int(port) + _METRICS_OFFSET}", f"{host}:{_MOONCAKE_METRICS_PORT}"]
    for address in [given] if given else usual:
        admin = MasterAdmin(address)
        try:
            admin.fetch_health()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            continue
        return admin
    return None


def find_ended_clients(segments: Sequence[Segment], metadata_server: str) -> set[str]:
    """Return the ids of the clients that have ended, among the clients with segments in the master's list.

    A master lists the segments of a crashed client for ten more seconds. A client that does not answer in time may be
    behind a firewall, so it does not count as ended.
    """
    with ThreadPoolExecutor(_MAX_PROBES) as threads:
        are_ended = threads.map(lambda segment: _has_ended(segment, metadata_server), segments)
        return {segment.client for segment, has_ended in zip(segments, are_ended, strict=True) if has_ended}


def _has_ended(segment: Segment, metadata_server: str) -> bool:
    """Return whether the client that gives a segment to the pool has ended: no process listens at its address."""
    try:
        host, _, port = (
            segment.endpoint if segment.is_handshaking else _look_up_endpoint(segment.name, metadata_server)
        ).rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_SECONDS).close()
    except LookupError:
        return True  # a client removes itself from the metadata server when it ends
    except OSError as exc:
        return exc.errno in _NOBODY_LISTENS
    except (httpx.HTTPError, ValueError):
        return False
    return False


def _look_up_endpoint(name: str, metadata_server: str) -> str:
    """Return a client's ``host:port`` from the metadata server; raise ``LookupError`` if the server has none."""
    params = {"key": f"mooncake/rpc_meta/{name}"}
    response = httpx.get(metadata_server, params=params, timeout=_TIMEOUT_SECONDS, trust_env=False)
    if response.status_code == httpx.codes.NOT_FOUND:
        raise LookupError(name)
    entry = response.raise_for_status().json()
    try:
        return f"{entry['ip_or_host_name']}:{entry['rpc_port']}"
    except (KeyError, TypeError) as exc:
        raise ValueError(f"the metadata server {metadata_server} has no address of the client {name}") from exc


def list_clusters_in_etcd(servers: Sequence[str]) -> dict[str, str]:
    """Return the address of the leading master of each Mooncake cluster, by cluster id.

    The addresses come from the first etcd server in ``servers`` (each ``host:port``) that answers.

    Raises:
        httpx.HTTPError: no etcd server answers.
        ValueError: the response is not from etcd.
    """
    response: httpx.Response | None = None
    for address in servers:
        body = {
            "key": _encode_base64(_VIEW_PREFIX),
            "range_end": _encode_base64(_VIEW_PREFIX[:-1] + chr(ord(_VIEW_PREFIX[-1]) + 1)),
        }
        try:
            response = httpx.post(f"http://{address}/v3/kv/range", json=body, timeout=_TIMEOUT_SECONDS, trust_env=False)
        except httpx.HTTPError:
            if address == servers[-1]:
                raise
            continue
        break
    assert response is not None
    found = {}
    for pair in response.raise_for_status().json().get("kvs", []):
        cluster, _, view = base64.b64decode(pair["key"]).decode().removeprefix(_VIEW_PREFIX).partition("/")
        if view == "master_view":
            found[cluster] = base64.b64decode(pair["value"]).decode()
    return found


def _encode_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
