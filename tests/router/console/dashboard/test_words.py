"""Figures with their units, as people read them."""

from __future__ import annotations

import pytest

from kvcommon.formats import format_bytes
from router.console.dashboard.words import format_count, format_rate, format_seconds, format_share


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (format_count(12345.0), "12,345"),
        (format_rate(0.05), "0.05"),
        (format_rate(12.34), "12.3"),
        (format_rate(1234.0), "1,234"),
        (format_rate(0.0), "0"),
        (format_share(0.0), "0 %"),
        (format_share(0.001), "< 1 %"),
        (format_share(0.8249), "82 %"),
        (format_share(0.9999), "> 99 %"),
        (format_share(1.0), "100 %"),
        (format_seconds(None), "\u2013"),
        (format_seconds(0.0021), "2.1 ms"),
        (format_seconds(0.187), "187 ms"),
        (format_seconds(1.284), "1.28 s"),
        (format_seconds(120.0), "120 s"),
        (format_bytes(512.0), "512 bytes"),
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
    ],
)
def test_a_figure_reads_with_its_unit(said: str, expected: str) -> None:
    assert said == expected
