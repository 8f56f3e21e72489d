"""A system that sends its spans to a receiver, and a picture of a traced request.

``python -m tests.end_to_end.traced docs/pictures/trace.svg`` draws the picture in docs/operations/metrics.md again.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import httpx

from engine.make_model import make_model
from tests.end_to_end.cluster import QUESTION, Instance, Router, instance, router
from tests.support import plain_http
from tests.support.mooncake import mooncake_master
from tests.support.otlp import OtlpReceiver, ReceivedSpan

__all__ = ["CLIENT", "TRACE", "TracedSystem", "ask_for_trace", "draw_trace", "order_as_tree", "traced_system"]

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

ROW, LEFT, WIDTH, TOP = 24, 250, 900, 64
COLOURS = {
    "queue": "#b9bdc4",
    "look-up": "#56b4e9",
    "load": "#009e73",
    "save": "#009e73",
    "prefill": "#d55e00",
    "hand-over": "#cc79a7",
    "decode": "#0072b2",
}


class TracedSystem(NamedTuple):
    """The processes of a system, and the receiver."""

    receiver: OtlpReceiver
    router: Router
    prefill: Instance
    decode: Instance


@contextlib.contextmanager
def traced_system(folder: Path, model: Path) -> Iterator[TracedSystem]:
    """Run a master, a router with two workers, and a pair. All send their spans to one receiver."""
    receiver = OtlpReceiver()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "100", "NO_PROXY": "127.0.0.1"}
    with (
        mooncake_master(folder / "master.log") as master,
        router(folder, "--workers", "2", environ=env) as running_router,
    ):
        flags = ("--router", f"127.0.0.1:{running_router.port}", "--splitwise-role")
        decoding = ("decode", "--enable-output-caching")
        with (
            instance(folder, model, *flags, "prefill", master=master, environ=env) as prefill,
            instance(folder, model, *flags, *decoding, master=master, environ=env) as decode,
        ):
            running_router.wait_for(prefill=1, decode=1)
            yield TracedSystem(receiver, running_router, prefill, decode)
    receiver.close()


def ask_for_trace(system: TracedSystem, max_tokens: int, num_saves: int) -> tuple[float, float]:
    """Send a traced request with half of its prompt in the pool; return its start and end at the client.

    Args:
        max_tokens: maximum number of tokens in the response.
        num_saves: number of instances that save blocks.
    """
    unsampled = {"traceparent": f"00-{TRACE[::-1]}-{CLIENT}-00"}
    _stream(system, QUESTION, unsampled, max_tokens=2)
    system.prefill.wait_for_saves()
    plain_http.post(f"{system.prefill.url}/clear_prefix_cache")
    began = time.time()
    _stream(system, QUESTION + QUESTION, {"traceparent": f"00-{TRACE}-{CLIENT}-01"}, max_tokens=max_tokens)
    ended = time.time()
    system.receiver.wait_for(1, kind="server", service="kvrouter")
    system.receiver.wait_for(num_saves, name="save")
    return began, ended


def _stream(system: TracedSystem, question: str, headers: dict[str, str], **fields: object) -> None:
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "ignore_eos": True, **fields}
    url = f"{system.router.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60, trust_env=False) as response:
        assert response.status_code == 200
        assert response.read().endswith(b"data: [DONE]\n\n")


def order_as_tree(spans: Sequence[ReceivedSpan]) -> list[tuple[int, ReceivedSpan]]:
    """Return the spans sorted by their start, each after its parent, with its depth."""
    known = {span.span_id for span in spans}

    def descend(parents: Sequence[ReceivedSpan], depth: int) -> Iterator[tuple[int, ReceivedSpan]]:
        for span in sorted(parents, key=lambda span: span.start):
            yield depth, span
            yield from descend([each for each in spans if each.parent_id == span.span_id], depth + 1)

    return list(descend([span for span in spans if span.parent_id not in known], 0))


def draw_trace(spans: Sequence[ReceivedSpan]) -> str:
    """Return a waterfall diagram of a trace as SVG."""
    rows = order_as_tree(spans)
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    scale = (WIDTH - LEFT - 90) / (last - first)
    height = TOP + ROW * len(rows) + 16
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        'font-size="13" role="img" aria-labelledby="t">',
        '  <title id="t">A trace of one request: the router, its attempt and two legs, and the phases at both '
        "instances</title>",
        f'  <rect width="{WIDTH}" height="{height}" rx="8" fill="#fbfbfa"/>',
        f'  <text x="20" y="28" fill="#33373d">trace {rows[0][1].trace_id}</text>',
        f'  <g fill="#6b7078" font-size="11"><text x="{LEFT}" y="50">0 ms</text>'
        f'<text x="{WIDTH - 90}" y="50" text-anchor="end">{(last - first) * 1e3:.1f} ms</text></g>',
    ]
    for place, (depth, span) in enumerate(rows):
        y, start, length = TOP + ROW * place, (span.start - first) * scale, max(1.0, (span.end - span.start) * scale)
        colour = COLOURS.get(span.name, "#33373d" if span.service == "kvrouter" else "#6b7078")
        took, since = (span.end - span.start) * 1e3, (span.start - first) * 1e3
        lines.append(
            f"  <g><title>{escape(span.name)}: from {since:.2f} ms, {took:.2f} ms</title>"
            f'<text x="{20 + 14 * depth}" y="{y + 14}" fill="#33373d">{escape(span.name)}</text>'
            f'<rect x="{LEFT + start:.1f}" y="{y + 3}" width="{length:.1f}" height="14" rx="2" fill="{colour}"/>'
            f'<text x="{LEFT + start + length + 6:.1f}" y="{y + 14}" fill="#6b7078" font-size="11">{took:.1f} ms</text>'
            "</g>"
        )
        if first_byte := span.events.get("first byte"):
            x = LEFT + (first_byte - first) * scale
            lines.append(f'  <rect x="{x - 1:.1f}" y="{y + 3}" width="2" height="14" fill="#f0e442"/>')
    return "\n".join([*lines, "</svg>", ""])


def main(path: Path) -> None:
    """Start a system, and draw the trace of its second request. The first one is slower."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        with traced_system(folder, folder / "model") as system:
            ask_for_trace(system, 16, 1)
            system.receiver.spans.clear()
            for each in (system.prefill, system.decode):
                each.wait_for_saves()
                plain_http.post(f"{each.url}/clear_prefix_cache")
            ask_for_trace(system, 16, 1)
            path.write_text(draw_trace(system.receiver.find(trace_id=TRACE)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
