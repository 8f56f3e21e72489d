"""Sends prompts to an inference server; collects the answers, their times and their numbers of cached tokens."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from kvstore_backend.cli.certify.processes import Program

__all__ = ["Answer", "Instance", "make_prompts", "make_two_histories"]

AT_ONCE = 4
"""Number of requests that run at the same time."""
_TEXT = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house
    service friend father power hour game line end member law car city community name president team minute idea
    body information
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Answer:
    """Answer to one prompt.

    Attributes:
        text: generated text, or None if the request failed.
        error: reason why the request failed; empty if it did not.
        seconds: time from the request to the complete answer.
        cached_tokens: number of prompt tokens that came from a cache, according to ``usage`` in the response.
    """

    text: str | None
    error: str
    seconds: float
    cached_tokens: int


class Instance:
    """Inference server that answers prompts.

    Args:
        name: name of the instance, for messages.
        program: the server's program.
        port: port of the server on this machine.
        hits_metric: metric with the number of tokens from the pool; if empty, ``cached_tokens`` in ``usage`` counts.
        request: members that all requests have in common.
        answer_seconds: seconds after which a request without an answer counts as failed.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        port: int,
        hits_metric: str,
        request: Mapping[str, Any],
        answer_seconds: float,
    ) -> None:
        self.name = name
        self.program = program
        self.port = port
        self._url = f"http://127.0.0.1:{port}"
        self._hits_metric = hits_metric
        self._request = request
        limits = httpx.Limits(max_connections=2 * AT_ONCE)
        self._client = httpx.Client(timeout=answer_seconds, trust_env=False, limits=limits)

    def ask(self, prompt: str, **members: Any) -> Answer:
        """Send a prompt with temperature 0, and return the answer. ``members`` are further members of the request."""
        body = {**self._request, "prompt": prompt, "temperature": 0, **members}
        begun = time.monotonic()
        try:
            response = self._client.post(f"{self._url}/v1/completions", json=body)
            seconds = time.monotonic() - begun
            if response.status_code != 200:
                return Answer(None, f"{response.status_code}: {response.text[:200]}", seconds, 0)
            content = response.json()
            details = (content.get("usage") or {}).get("prompt_tokens_details") or {}
            text = content["choices"][0]["text"]
            if not isinstance(text, str):
                return Answer(None, f"the answer has the text {text!r}", seconds, 0)
            return Answer(text, "", seconds, details.get("cached_tokens") or 0)
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
            return Answer(None, f"{type(exc).__name__}: {exc}", time.monotonic() - begun, 0)

    def ask_all(
        self, prompts: Sequence[str], on_answered: Callable[[int], None] = lambda count: None, **members: Any
    ) -> list[Answer]:
        """Send all prompts, ``AT_ONCE`` at the same time, and return the answers.

        Calls ``on_answered`` after each answer with the number of answers so far.
        """
        lock, count = threading.Lock(), 0

        def ask_one(prompt: str) -> Answer:
            nonlocal count
            answer = self.ask(prompt, **members)
            with lock:
                count += 1
                on_answered(count)
            return answer

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(ask_one, prompts))

    def ask_and_leave(self, prompts: Sequence[str], seconds: Sequence[float]) -> None:
        """Send each prompt ``i``, and close its connection after ``seconds[i]`` seconds, as if the client gave up."""

        def ask_one(prompt: str, patience: float) -> None:
            body = {**self._request, "prompt": prompt, "temperature": 0}
            timeout = httpx.Timeout(10, read=patience)
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{self._url}/v1/completions", json=body, timeout=timeout, trust_env=False)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(ask_one, prompts, seconds))

    def count_hits(self, answers: Sequence[Answer]) -> float:
        """Return the number of prompt tokens that came from a cache.

        With a metric for hits, all prompts since the server's start are counted; without it, only those of ``answers``.
        """
        if not self._hits_metric:
            return sum(answer.cached_tokens for answer in answers)
        page = self._client.get(f"{self._url}/metrics").text
        samples = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == self._hits_metric]
        # After the name and the labels comes the value, and after it perhaps a timestamp.
        return sum(float(line[max(line.rfind("}") + 1, len(self._hits_metric)) :].split()[0]) for line in samples)

    def is_ready(self, path: str) -> bool:
        """Return whether the server answers a request for ``path`` with status 200."""
        try:
            return httpx.get(f"{self._url}{path}", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def find_version(self) -> str:
        """Return the version that the server reports at ``/version``, as vLLM does; empty if it reports none."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            return str(self._client.get(f"{self._url}/version").json()["version"])
        return ""

    def close(self) -> None:
        """Close the connections to the server."""
        self._client.close()


def make_prompts(seed: int, count: int, words: int, *, is_shared: bool) -> list[str]:
    """Return ``count`` prompts of ``words`` random words.

    With ``is_shared``, about four prompts each begin with the same words, which are two thirds of the prompt.
    """
    chance = random.Random(seed)
    num_beginnings = max(1, count // 4) if is_shared else count
    beginnings = [" ".join(chance.choices(_WORDS, k=2 * words // 3)) for _ in range(num_beginnings)]
    ends = [" ".join(chance.choices(_WORDS, k=words // 3)) for _ in range(count)]
    return [f"{beginnings[number % num_beginnings]} {end}" for number, end in enumerate(ends)]


def make_two_histories(seed: int, words: int) -> tuple[list[str], list[str]]:
    """Return two prompts for one instance to save, and two prompts for the other instance to answer.

    The prompts to save are ``A C`` and ``B D``; the prompts to answer are ``A D`` and ``B C``. ``A`` has the same words
    as ``B`` in another order, but the same first word and the same last third. So all prompts have the same number of
    tokens, and each block of a prompt to answer has the tokens of a block at the same position in a saved prompt. Some
    of these blocks follow other tokens, so they must not be used.
    """
    chance = random.Random(seed)
    first, *middle = chance.choices(_WORDS, k=words // 3)
    last = " ".join(chance.choices(_WORDS, k=words // 3))
    ends = [" ".join(chance.choices(_WORDS, k=words // 3)) for _ in range(2)]
    beginnings = [" ".join([first, *order, last]) for order in (middle, middle[::-1])]
    pairs = [[f"{beginnings[number]} {ends[number ^ other]}" for number in range(2)] for other in range(2)]
    return pairs[0], pairs[1]
