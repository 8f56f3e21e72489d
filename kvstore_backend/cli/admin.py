"""A Mooncake master's HTTP side, on the port its ``--metrics_port`` names, and the masters that etcd knows."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from kvstore_backend.config import MooncakeSettings

__all__ = ["MasterAdmin", "Segment", "find_admin", "list_clusters_in_etcd"]

_TIMEOUT_SECONDS = 2.0
# FastDeploy runs a master on 15001 with metrics on 15003; Mooncake's own default for metrics is 9003.
_METRICS_OFFSET = 2
_MOONCAKE_METRICS_PORT = 9003
_VIEW_PREFIX = "mooncake-store/"


@dataclass(frozen=True)
class Segment:
    """Memory that a client gives to the pool.

    Attributes:
        name: the client's host and port.
        is_handshaking: whether the client joined with ``P2PHANDSHAKE``, not with a metadata server. Mooncake does
            not say so; it shows in the endpoint, which then is not the segment's name (seen with 0.3.13).
        used: bytes.
        capacity: bytes.
    """

    name: str
    is_handshaking: bool
    used: int
    capacity: int


class MasterAdmin:
    """One master's HTTP side; methods raise ``httpx.HTTPError`` or ``ValueError`` for a response of another server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def fetch_health(self) -> dict[str, Any]:
        """``role``, ``ha_state``, ``service_ready``, ``leader_address``."""
        health = self._fetch_page("/health").json()
        if not isinstance(health, dict) or "role" not in health:
            raise ValueError(f"{self.address}/health is not a Mooncake master's")
        return health

    def fetch_metrics(self) -> dict[str, float]:
        """All metrics without labels."""
        # Not by Prometheus' own parser: some of Mooncake's counters lack the ending that it demands of them.
        lines = (line.split(" ") for line in self._fetch_page("/metrics").text.splitlines() if not line.startswith("#"))
        return {line[0]: float(line[1]) for line in lines if len(line) == 2 and "{" not in line[0]}

    def list_segments(self) -> list[Segment]:
        """The memory of the pool, client by client."""
        page = self._fetch_page("/get_segments_detail").json()
        try:
            return [
                Segment(
                    each["segment_name"],
                    each["te_endpoint"] != each["segment_name"],
                    int(each["allocator_used_bytes"]),
                    int(each["allocator_capacity_bytes"]),
                )
                for each in page["segments"]
            ]
        except (KeyError, TypeError) as exc:
            raise ValueError(f"{self.address}/get_segments_detail lacks {exc}") from exc

    def list_keys(self) -> Iterator[str]:
        """Every key of the pool."""
        with httpx.stream("GET", f"http://{self.address}/get_all_keys", timeout=30, trust_env=False) as response:
            response.raise_for_status()
            yield from filter(None, response.iter_lines())

    def has_tenants(self) -> bool:
        """Whether the master keeps tenants apart (``--enable_multi_tenants``)."""
        url = f"http://{self.address}/tenant_quota_policy"
        return httpx.get(url, timeout=_TIMEOUT_SECONDS, trust_env=False).status_code != httpx.codes.NOT_FOUND

    def _fetch_page(self, path: str) -> httpx.Response:
        response = httpx.get(f"http://{self.address}{path}", timeout=_TIMEOUT_SECONDS, trust_env=False)
        return response.raise_for_status()


def find_admin(master: str, given: str | None = None) -> MasterAdmin | None:
    """The HTTP side of the master at ``host:port``: at ``given``, else where masters usually have it."""
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


def list_clusters_in_etcd(settings: MooncakeSettings) -> dict[str, str]:
    """Cluster id -> address of its leading master, as the first etcd server that answers tells.

    Raises:
        httpx.HTTPError: none of them answers.
        ValueError: the response is not of etcd.
    """
    response: httpx.Response | None = None
    for address in settings.etcd_addresses:
        body = {
            "key": _encode_base64(_VIEW_PREFIX),
            "range_end": _encode_base64(_VIEW_PREFIX[:-1] + chr(ord(_VIEW_PREFIX[-1]) + 1)),
        }
        try:
            response = httpx.post(f"http://{address}/v3/kv/range", json=body, timeout=_TIMEOUT_SECONDS, trust_env=False)
        except httpx.HTTPError:
            if address == settings.etcd_addresses[-1]:
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
