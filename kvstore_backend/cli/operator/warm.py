"""Send a file of prompts to an instance or a router, to store their blocks before requests need them.

Each prompt requests one token, with the lowest priority that a router knows. A file next to the file of prompts lists
those that were warmed, so that an interrupted run can continue later.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.cli.progress import show_progress
from kvstore_backend.cli.report import print_json

__all__ = ["add_arguments", "run"]

_PRIORITY = "-10"
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# These replace the fields of the line: one token, not streamed, without features that only longer answers have.
_FOR_ONE_TOKEN = {"max_tokens": 1, "stream": False, "n": 1}
_DROPPED = ("max_completion_tokens", "min_tokens", "stream_options", "best_of")
_MAX_FAILURES_IN_A_ROW = 5


@dataclass(frozen=True)
class _Prompt:
    """Line of the file, and the request that is made from it."""

    line: int
    path: str
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        return hashlib.sha256(json.dumps([self.path, self.body], sort_keys=True).encode()).hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvstore warm``."""
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a prompt a line: a JSON text, token ids, or a request with its fields")
    add("--to", required=True, metavar="URL", help="a router, or an instance: http://HOST:PORT")
    add("--model", metavar="NAME", help="the model to ask, where a line names none and the server has several")
    add("--api-key", metavar="FILE", type=Path, help="a file with the router's API key")
    add("--parallel", type=int, default=2, metavar="N", help="prompts on their way at once (default %(default)s)")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for one prompt (default %(default)g)")
    add("--again", action="store_true", help="also those that an earlier run has warmed")
    add("--dry-run", action="store_true", help="check the file, and only say how many would be sent")
    add("--json", action="store_true", help="one JSON document instead of lines")
    parser.epilog = "What was warmed is noted in FILE.warmed; the requested priority is the lowest, -10."


def run(arguments: argparse.Namespace) -> int:
    """Send the prompts that were not sent before.

    Raises:
        ConfigError: the file, or an argument, cannot be used.
        PoolUnavailable: the server cannot be reached, or refused prompts.
    """
    if arguments.parallel < 1 or not arguments.timeout > 0:
        raise ConfigError("--parallel must be at least 1, and --timeout more than 0")
    prompts = list(_read_prompts(arguments.file, arguments.model))
    notes = arguments.file.with_name(arguments.file.name + ".warmed")
    known = set() if arguments.again else _read_notes(notes)
    waiting = list({prompt.name: prompt for prompt in prompts if prompt.name not in known}.values())
    counts = Counter(prompts=len(prompts), skipped=len(prompts) - len(waiting), warmed=0, failed=0)
    tokens: Counter[str] = Counter(prompt_tokens=0, cached_tokens=0)
    began, trouble = time.monotonic(), ""
    if waiting and not arguments.dry_run:
        trouble = _warm_prompts(waiting, arguments, notes, counts, tokens)
    figures = {"dry_run": arguments.dry_run, **counts, "waiting": len(waiting), **tokens}
    figures["waiting"] -= counts["warmed"]
    _print_figures(figures, time.monotonic() - began, is_json=arguments.json)
    if trouble:
        raise PoolUnavailable(f"{counts['failed']} of the prompts were not warmed; the last trouble: {trouble}")
    return 0


def _warm_prompts(
    waiting: Sequence[_Prompt],
    arguments: argparse.Namespace,
    notes: Path,
    counts: Counter[str],
    tokens: Counter[str],
) -> str:
    """Send the prompts; return the last error, or "". Stops when several in a row fail: the server has gone."""
    trouble, in_a_row = "", 0
    headers = {"X-Priority": _PRIORITY, **_read_key(arguments.api_key)}
    with (
        _open_notes(notes) as noted,
        httpx.Client(base_url=arguments.to, headers=headers, timeout=arguments.timeout, trust_env=False) as client,
        ThreadPoolExecutor(arguments.parallel) as threads,
        show_progress("warm", len(waiting)) as tell,
    ):
        is_over = threading.Event()
        futures = {threads.submit(_send_prompt, client, prompt, is_over): prompt for prompt in waiting}
        try:
            for future in as_completed(futures):
                prompt = futures[future]
                if failure := _note_answer(future, prompt, noted, counts, tokens):
                    counts["failed"] += 1
                    trouble, in_a_row = f"line {prompt.line}: {failure}", in_a_row + 1
                else:
                    in_a_row = 0
                tell(
                    counts["warmed"] + counts["failed"], f"{counts['warmed']} prompts, {tokens['prompt_tokens']} tokens"
                )
                if in_a_row >= _MAX_FAILURES_IN_A_ROW:
                    return f"{trouble}; {in_a_row} failed in a row, so the others were not sent"
        finally:
            is_over.set()
            threads.shutdown(cancel_futures=True)
    return trouble


def _send_prompt(client: httpx.Client, prompt: _Prompt, is_over: threading.Event) -> Mapping[str, int]:
    """Request one token; return how many tokens the prompt had, and how many of them were already cached.

    Raises:
        PoolUnavailable: the request failed; the message is the end of a sentence with the reason.
    """
    if is_over.is_set():
        raise PoolUnavailable("it was not sent")
    try:
        response = client.post(prompt.path, json=prompt.body)
        answer = response.json() if response.headers.get("content-type", "").startswith("application/json") else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        raise PoolUnavailable(f"no answer from {client.base_url}: {exc}") from exc
    if response.status_code != httpx.codes.OK:
        raise PoolUnavailable(f"status {response.status_code}: {_find_message(answer) or response.text[:200]}")
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        raise PoolUnavailable(f"what answers at {client.base_url} is no server of a model: its answer has no usage")
    details = usage.get("prompt_tokens_details") or {}
    return {
        "prompt_tokens": int(usage.get("prompt_tokens") or 0),
        "cached_tokens": int(details.get("cached_tokens") or 0),
    }


def _note_answer(
    future: Future[Mapping[str, int]], prompt: _Prompt, noted: IO[str], counts: Counter[str], tokens: Counter[str]
) -> str:
    """Count an answer and note that its prompt is warm; otherwise return the reason why it is not."""
    try:
        usage = future.result()
    except PoolUnavailable as exc:
        return str(exc)
    noted.write(json.dumps({"sha256": prompt.name, "line": prompt.line, **usage}) + "\n")
    noted.flush()
    counts["warmed"] += 1
    tokens.update(usage)
    return ""


def _print_figures(figures: Mapping[str, Any], seconds: float, *, is_json: bool) -> None:
    if is_json:
        print_json({**figures, "seconds": round(seconds, 3)})
    elif figures["dry_run"]:
        print(f"{figures['waiting']} of {figures['prompts']} prompts would be sent")
    else:
        print(
            f"{figures['warmed']} of {figures['prompts']} prompts were warmed in {seconds:.1f} s: "
            f"{figures['prompt_tokens']} tokens, of which {figures['cached_tokens']} were cached already"
            + (f"; {figures['skipped']} were warmed before, or come twice" if figures["skipped"] else "")
        )


def _read_prompts(file: Path, model: str | None) -> Iterator[_Prompt]:
    """Read the prompts of a file; empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, has no prompt, or has a line that is not a prompt.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"the file of prompts {str(file)!r} cannot be read: {reason}") from None
    written = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not written:
        raise ConfigError(f"the file of prompts {str(file)!r} has none")
    for number, line in written:
        try:
            value = json.loads(line)
        except ValueError as exc:
            raise ConfigError(f"line {number} of {file} is not JSON: {exc}") from None
        yield _read_prompt(value, number, file, model)


def _read_prompt(value: object, number: int, file: Path, model: str | None) -> _Prompt:
    request = value if isinstance(value, dict) else {"prompt": value}
    prompt, messages = request.get("prompt"), request.get("messages")
    is_text = isinstance(prompt, str) and prompt != ""
    is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    is_chat = isinstance(messages, list) and messages
    if (is_text or is_tokens) == bool(is_chat):
        raise ConfigError(
            f"line {number} of {file} is no prompt: give a text, a list of token ids, or an object that has either "
            '"prompt" or "messages"'
        )
    kept = {name: field for name, field in request.items() if name not in _DROPPED}
    body = {**({"model": model} if model else {}), **kept, **_FOR_ONE_TOKEN}
    return _Prompt(number, _CHAT if is_chat else _COMPLETIONS, body)


def _read_notes(notes: Path) -> set[str]:
    """Return the names of the prompts that were warmed; an incomplete line is ignored."""
    names = set()
    try:
        lines = notes.read_text().splitlines()
    except FileNotFoundError:
        return set()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{notes} cannot be read, which has what was warmed before: {exc}") from None
    for line in lines:
        try:
            names.add(json.loads(line)["sha256"])
        except (ValueError, TypeError, KeyError):
            continue
    return names


def _open_notes(notes: Path) -> IO[str]:
    """Open the notes to append to them, at the start of a line."""
    try:
        is_torn = notes.exists() and not notes.read_bytes().endswith(b"\n")
        opened = notes.open("a")
        opened.write("\n" if is_torn else "")
        return opened
    except OSError as exc:
        raise ConfigError(f"{notes} cannot be written to, where it is noted what was warmed: {exc.strerror}") from None


def _read_key(file: Path | None) -> dict[str, str]:
    """Return the header with the API key."""
    if file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {file.read_text().strip()}"}
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--api-key names {str(file)!r}, which cannot be read: {exc}") from None


def _find_message(answer: object) -> str:
    """Return the message of an error, as OpenAI's and our servers write it."""
    error = answer.get("error", answer.get("detail")) if isinstance(answer, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")
