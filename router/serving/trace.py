"""The way of each request in the log, for a person debugging; called only where the log level is ``debug``."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.policies import Decision
    from router.serving.attempt import Attempt
    from router.serving.selection import Selection
    from router.telemetry import RequestRecord

__all__ = ["log_attempt_end", "log_choice", "log_request_end"]

_log = logging.getLogger("router.serving.trace")


def log_choice(request_id: str, number: int, selection: Selection, prompt_tokens: int) -> None:
    """Say which instances were chosen for an attempt, and why."""
    instances = [selection.answering] if selection.prefill is None else [selection.prefill, selection.answering]
    choices = "; ".join(
        f"{instance.role.value} {instance.key} because of {_format_reasons(decision)}"
        for instance, decision in zip(instances, selection.decisions, strict=False)
    )
    expected = selection.decisions[0].cached_tokens
    text = "request %s, attempt %d: %s; about %d prompt tokens, %d of them expected in a cache"
    _log.debug(text, request_id, number, choices, prompt_tokens, expected)


def log_attempt_end(request_id: str, number: int, attempt: Attempt | None, how: str) -> None:
    """Say how an attempt ended, and after how long."""
    milliseconds = (time.perf_counter() - attempt.sent_at) * 1e3 if attempt is not None and attempt.sent_at else 0.0
    _log.debug("request %s, attempt %d: %s after %.1f ms", request_id, number, how, milliseconds)


def log_request_end(record: RequestRecord) -> None:
    """Say how a request ended: its status, its tokens as engines counted them, its times."""
    ended = f"{record.method} {record.path} {record.status}{' ' + record.error if record.error else ''}"
    counts = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    tokens = ("unknown" if count is None else count for count in counts)
    text = "request %s: %s; prompt tokens: %s, cached: %s, generated: %s; first byte after %.1f ms, end after %.1f ms"
    _log.debug(text, record.request_id, ended, *tokens, record.first_byte_ms, record.total_ms)


def _format_reasons(decision: Decision) -> str:
    reasons = [
        f"{name}={reason if isinstance(reason, str) else f'{reason:g}'}" for name, reason in decision.reasons.items()
    ]
    return ", ".join([*reasons, f"work={decision.work:g}"])
