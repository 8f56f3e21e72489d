"""``--isolation``: measures whether a tenant learns from times to first token which prompts another tenant has sent.

Both tenants send their requests through the recipe's router, each with its own API key. The victim sends half of the
prompts. The attacker then sends all of them in random order, each once, and guesses that a prompt was sent before if
its first token comes soon. The area under the ROC curve shows how good that guess is: it is the probability that a
prompt of the victim has its first token sooner than another prompt. With 1, all guesses can be right; with 0.5, they
are random.
"""

from __future__ import annotations

import json
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from kvstore_backend.backend import KVStoreError
from kvstore_backend.cli.certify.instances import make_prompts
from kvstore_backend.cli.certify.processes import Program, find_free_ports
from kvstore_backend.cli.certify.recipe import Recipe, RouterSettings, split_command

__all__ = ["ISOLATION_COLUMNS", "Isolation", "ProbeFailed", "compute_auc", "compute_interval", "measure_isolation"]

ISOLATION_COLUMNS = (
    *("API keys", "probes", "AUC", "99 % interval", "TTFT sent ms", "TTFT new ms", "cached tokens", "result"),
)

_KEYS = {"victim": "sk-victim", "attacker": "sk-attacker"}
_ROUNDS = 4
_START_SECONDS = 60.0
_SEED = 1
_QUANTILE = 2.576
"""Quantile of the normal distribution for a two-sided interval of 99 %."""


class ProbeFailed(KVStoreError):
    """Error: the router answered a request with an error, or did not answer."""


@dataclass(frozen=True)
class Isolation:
    """Result of one measurement: how well the attacker found out which prompts the victim had sent.

    Attributes:
        case: ``no salts``, or ``each has a salt`` if each API key had its own salt.
        probes: number of prompts that the attacker sent; the victim had sent half of them.
        auc: area under the ROC curve.
        low, high: limits of the 99 % interval of ``auc``.
        sent_ms: the attacker's median time to first token for prompts that the victim had sent, in milliseconds.
        new_ms: the attacker's median time to first token for new prompts, in milliseconds.
        cached_tokens: prompt tokens of the attacker that came from a cache, according to ``usage``.
        problems: one sentence for each requirement that was not met.
    """

    case: str
    probes: int
    auc: float
    low: float
    high: float
    sent_ms: float
    new_ms: float
    cached_tokens: int
    problems: Sequence[str]

    def describe(self) -> tuple[str, ...]:
        """Return the cells of this result's line in a table, in the order of ``ISOLATION_COLUMNS``."""
        figures = (f"{self.auc:.3f}", f"{self.low:.2f} to {self.high:.2f}", f"{self.sent_ms:.0f}", f"{self.new_ms:.0f}")
        return (
            *(self.case, str(self.probes), *figures, str(self.cached_tokens)),
            "FAILED" if self.problems else "passed",
        )


def compute_auc(sooner: Sequence[float], later: Sequence[float]) -> float:
    """Return the probability that a value of ``sooner`` is less than a value of ``later``; equal values count half."""
    wins = sum((first < second) + (first == second) / 2 for first in sooner for second in later)
    return wins / (len(sooner) * len(later))


def compute_interval(auc: float, num_sooner: int, num_later: int) -> tuple[float, float]:
    """Return the limits of the 99 % interval of an area under the ROC curve.

    The interval contains all true areas that are compatible with the measured area ``auc``, by the standard error of
    Hanley and McNeil (1982) in the form of Newcombe (2006, method 5). The usual interval has no width if ``auc`` is 1.

    Args:
        auc: the measured area, as ``compute_auc`` returns it.
        num_sooner: number of values in ``sooner`` for ``compute_auc``.
        num_later: number of values in ``later``.
    """
    size = (num_sooner + num_later) / 2

    def is_compatible(area: float) -> bool:
        spread = 1 + (size - 1) * ((1 - area) / (2 - area) + area / (1 + area))
        variance = area * (1 - area) * spread / (num_sooner * num_later)
        return abs(area - auc) <= _QUANTILE * math.sqrt(variance)

    return _find_limit(is_compatible, auc, 0.0), _find_limit(is_compatible, auc, 1.0)


def _find_limit(is_inside: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return, by bisection, the end of an interval that contains ``inside``, but not ``outside``."""
    for _ in range(40):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
    return inside


def measure_isolation(
    recipe: Recipe, router: RouterSettings, ports: Sequence[int], folder: Path, num_prompts: int, *, has_salts: bool
) -> Isolation:
    """Start the router in front of the instances, and measure how well an attacker finds out the victim's prompts.

    Args:
        recipe: the recipe.
        router: the router in the recipe.
        ports: ports of the instances.
        folder: folder for files and logs.
        num_prompts: number of prompts that the victim sends.
        has_salts: whether the router adds a salt for each API key.

    Raises:
        StartFailed: the router did not start.
        ProbeFailed: a request failed.
    """
    (port,) = find_free_ports(1)
    own = folder / "isolation"  # the recipe may have files with the same names
    own.mkdir(exist_ok=True)
    keys, instances = own / "api_keys", own / "instances.yaml"
    keys.write_text("".join(f"{name}: {key}\n" for name, key in _KEYS.items()))
    listed = [{"role": "mixed", "host_ip": "127.0.0.1", "port": str(each), **router.instance} for each in ports]
    instances.write_text(json.dumps({"instances": listed}))  # JSON is YAML, too
    known = {"port": str(port), "keys": shlex.quote(str(keys)), "instances": shlex.quote(str(instances))}
    known["salts"] = recipe.expand(router.salts, **known) if has_salts else ""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2 * recipe.stall_seconds, trust_env=False) as client:
        program = Program(
            "router",
            split_command(recipe.expand(router.command, **known)),
            {},
            folder,
            partial(_is_ready, client),
            _START_SECONDS,
        )
        try:
            program.start()
            seed = _SEED + has_salts
            sent, new, cached_tokens = _probe_prompts(partial(_ask, client, recipe), recipe, num_prompts, seed)
        finally:
            program.stop()
    auc = compute_auc(sent, new)
    low, high = compute_interval(auc, len(sent), len(new))
    problems = []
    if not has_salts and low <= 0.5 <= high:
        problems.append("the attacker learns nothing without salts either, so the measurement with salts shows nothing")
    if has_salts and not low <= 0.5 <= high:
        problems.append("times to first token show which prompts were sent before, although each API key has a salt")
    if has_salts and cached_tokens:
        problems.append(f"{cached_tokens} prompt tokens of the attacker came from the victim's cache")
    case = "each has a salt" if has_salts else "no salts"
    medians = [1000 * statistics.median(times) for times in (sent, new)]
    return Isolation(case, len(sent) + len(new), auc, low, high, medians[0], medians[1], cached_tokens, problems)


def _probe_prompts(
    ask: Callable[[str, str], tuple[float, int]], recipe: Recipe, count: int, seed: int
) -> tuple[list[float], list[float], int]:
    """Send the prompts of the victim and of the attacker.

    Args:
        ask: sends a prompt with the API key of a tenant; returns time to first token and number of cached tokens.
        count: number of prompts that the victim sends; the attacker sends these and as many new prompts.

    Returns:
        The attacker's times to first token for the victim's and for new prompts, and its total of cached tokens.
    """
    chance = random.Random(seed)
    prompts = iter(make_prompts(1000 + seed, 2 * (count + len(_KEYS)), recipe.prompt_words, is_shared=False))
    for name in (*_KEYS, *_KEYS):
        ask(next(prompts), name)
    sent: list[float] = []
    new: list[float] = []
    cached_tokens = 0
    for number in range(_ROUNDS):
        share = (number + 1) * count // _ROUNDS - number * count // _ROUNDS
        known = [next(prompts) for _ in range(share)]
        for prompt in known:
            ask(prompt, "victim")
        time.sleep(recipe.saved_seconds)
        probes = [(prompt, sent) for prompt in known] + [(next(prompts), new) for _ in known]
        chance.shuffle(probes)
        for prompt, times in probes:
            seconds, tokens = ask(prompt, "attacker")
            times.append(seconds)
            cached_tokens += tokens
    return sent, new, cached_tokens


def _ask(client: httpx.Client, recipe: Recipe, prompt: str, name: str) -> tuple[float, int]:
    """Send a prompt with the API key of tenant ``name``; return time to first token and number of cached tokens."""
    body = {"model": recipe.instance.model, "prompt": prompt, "temperature": 0, "max_tokens": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"Authorization": f"Bearer {_KEYS[name]}"}
    seconds, tokens = None, 0
    begun = time.monotonic()
    try:
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise ProbeFailed(f"the router answers {response.status_code}: {response.read().decode()[:200]}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ProbeFailed(f"the router ended a stream with an error: {line[:200]}")
                    if event.get("choices"):
                        seconds = seconds or time.monotonic() - begun
                    usage = event.get("usage") or {}
                    tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or tokens
    except (httpx.HTTPError, ValueError, AttributeError) as exc:  # AttributeError: usage is no object
        raise ProbeFailed(f"a request to the router failed: {type(exc).__name__}: {exc}") from exc
    if seconds is None:
        raise ProbeFailed("the router ended a stream without a token")
    return seconds, tokens


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.HTTPError:
        return False
