"""Reads the metrics page and the memory segments of a Mooncake master."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Segment", "parse_plain_metrics", "read_segment"]


@dataclass(frozen=True)
class Segment:
    """Memory segment: memory that one client gives to the pool.

    Attributes:
        name: host and port of the client; other clients use them as the client's name.
        client: the client's id at the master; one client may give several segments.
        endpoint: with ``P2PHANDSHAKE``, the address at which the client listens; else the same as ``name``.
        used: bytes of blocks in the segment.
        capacity: size of the segment in bytes.
    """

    name: str
    client: str
    endpoint: str
    used: int
    capacity: int

    @property
    def is_handshaking(self) -> bool:
        """Whether the client joined with ``P2PHANDSHAKE``, not with a metadata server.

        Mooncake does not report how a client joined. With ``P2PHANDSHAKE`` the endpoint differs from the segment's
        name (seen with Mooncake 0.3.13).
        """
        return self.endpoint != self.name


def read_segment(entry: Mapping[str, Any]) -> Segment:
    """Read one entry of the list that a master returns for ``/get_segments_detail``.

    Raises:
        KeyError, TypeError, ValueError: a member of the entry is missing or is not a number.
    """
    name = entry["segment_name"]
    used, capacity = int(entry["allocator_used_bytes"]), int(entry["allocator_capacity_bytes"])
    return Segment(name, entry.get("client_id", name), entry.get("te_endpoint", name), used, capacity)


def parse_plain_metrics(text: str) -> dict[str, float]:
    """Return the metrics that have no labels, by name, from a page in Prometheus' text format.

    Prometheus' own parser cannot read the page: it requires a suffix that some of Mooncake's counters lack.

    Raises:
        ValueError: a value on the page is not a number.
    """
    lines = (line.split(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {line[0]: float(line[1]) for line in lines if len(line) == 2 and "{" not in line[0]}
