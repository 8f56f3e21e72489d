"""The metrics page and the segments of a Mooncake master."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Segment", "parse_plain_metrics", "read_segment"]


@dataclass(frozen=True)
class Segment:
    """Memory that one client gives to the pool.

    Attributes:
        name: the client's host and port; other clients use it as the client's name.
        client: the client's id at the master; one client may give several segments.
        endpoint: with ``P2PHANDSHAKE``, the address at which the client listens.
        used: bytes.
        capacity: bytes.
    """

    name: str
    client: str
    endpoint: str
    used: int
    capacity: int

    @property
    def is_handshaking(self) -> bool:
        """Whether the client joined with ``P2PHANDSHAKE``, not with a metadata server.

        Mooncake does not report this. With ``P2PHANDSHAKE`` the endpoint differs from the segment's name (seen with
        0.3.13).
        """
        return self.endpoint != self.name


def read_segment(entry: Mapping[str, Any]) -> Segment:
    """Read an entry of a master's ``/get_segments_detail``.

    Raises:
        KeyError, TypeError, ValueError: the entry lacks a member.
    """
    name = entry["segment_name"]
    used, capacity = int(entry["allocator_used_bytes"]), int(entry["allocator_capacity_bytes"])
    return Segment(name, entry.get("client_id", name), entry.get("te_endpoint", name), used, capacity)


def parse_plain_metrics(text: str) -> dict[str, float]:
    """Return the metrics without labels from a page in Prometheus' text format.

    Prometheus' own parser cannot be used: some of Mooncake's counters lack the suffix that it requires.

    Raises:
        ValueError: the page has another format.
    """
    lines = (line.split(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {line[0]: float(line[1]) for line in lines if len(line) == 2 and "{" not in line[0]}
