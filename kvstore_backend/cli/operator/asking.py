"""Sends HTTP requests to instances and routers, for operator commands. Each error has a message of one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvcommon.addresses import parse_address
from kvcommon.secret_files import read_token
from kvstore_backend.backend import ConfigError, PoolUnavailable
from kvstore_backend.manifest import Manifest, ManifestError, parse_manifest

__all__ = [
    "CacheState",
    "clear_cache",
    "clear_caches_of_router",
    "detokenize",
    "find_pool_url",
    "is_address",
    "list_instances",
    "read_cache",
    "read_instance",
    "tokenize",
]

# Long enough for a router, which sends requests to its instances.
_TIMEOUT_SECONDS = 30.0
_ROLES = ("mixed", "prefill", "decode")
_CLEAR_PATHS = ("/clear_prefix_cache", "/reset_prefix_cache", "/flush_cache")


@dataclass(frozen=True)
class CacheState:
    """State of an instance's own cache.

    Attributes:
        address: address of the instance.
        digest: digest of the namespace of the instance's blocks; empty if the instance does not report it.
        num_blocks: number of blocks in the cache, or None if the instance does not report it.
    """

    address: str
    digest: str
    num_blocks: int | None

    @property
    def sentence(self) -> str:
        """Sentence for an operator who has cleared the pool: which blocks are still in this instance's own cache."""
        if self.num_blocks is None:
            return f"the instance at {self.address} does not report its own cache; --caches clears the cache"
        if not self.num_blocks:
            return f"the instance at {self.address} has no blocks in its own cache"
        return f"the instance at {self.address} still has {self.num_blocks} blocks in its own cache; --caches clears it"


def is_address(text: str) -> bool:
    """Return whether ``text`` is an address: HOST:PORT, or http://HOST:PORT."""
    with contextlib.suppress(ValueError):
        return bool(parse_address(text))
    return False


def read_instance(address: str) -> Manifest:
    """Read the manifest of an instance's namespace.

    Raises:
        ConfigError: ``address`` is not an address.
        PoolUnavailable: no server answers at the address, or the server is not an instance of this project.
    """
    content = _ask(address, "instance", "GET", "/kvcache")
    try:
        return parse_manifest(content.get("manifest"))
    except ManifestError as exc:
        raise PoolUnavailable(
            f"the instance at {address} reports no valid manifest (description) of its namespace: {exc}"
        ) from None


def read_cache(address: str) -> CacheState:
    """Read the state of an instance's own cache. Instances of other engines do not report this state.

    Raises:
        ConfigError: ``address`` is not an address.
        PoolUnavailable: no server answers at the address.
    """
    answer, content = _request(address, "instance", "GET", "/kvcache")
    if answer.status_code != httpx.codes.OK or not isinstance(content, dict):
        return CacheState(address, "", None)
    digest, count = content.get("digest"), content.get("cached_blocks")
    return CacheState(address, digest if isinstance(digest, str) else "", count if isinstance(count, int) else None)


def clear_cache(address: str) -> None:
    """Request an instance of this project, of vLLM or of SGLang to clear its own cache.

    Raises:
        ConfigError: ``address`` is not an address.
        PoolUnavailable: no server answers at the address, or the instance did not clear its cache.
    """
    status = 0
    for path in _CLEAR_PATHS:
        answer, _ = _request(address, "instance", "POST", path)
        if (status := answer.status_code) == httpx.codes.OK:
            return
        if status not in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            break
    raise PoolUnavailable(f"the instance at {address} did not clear its own cache; it answered with status {status}")


def list_instances(router: str, token_file: Path | None) -> list[str]:
    """Return the addresses of a router's instances.

    Raises:
        ConfigError: ``router`` is not an address, or the file with the token cannot be read.
        PoolUnavailable: no server answers at the address, or the server is not a router.
    """
    content = _ask(router, "router", "GET", "/registered", headers=_authorise(token_file))
    entries = [each for role in _ROLES for each in content.get(role, [])]
    return [f"{each['host_ip']}:{each['port']}" for each in entries]


def clear_caches_of_router(router: str, token_file: Path | None) -> list[str]:
    """Request a router to clear the own caches of all its instances; return a sentence for each failed instance.

    Raises the same errors as ``list_instances``.
    """
    headers = _authorise(token_file)
    answer, content = _request(router, "router", "POST", "/admin/clear_prefix_cache", headers=headers)
    outcomes = content.get("instances") if isinstance(content, dict) else None
    if not isinstance(outcomes, dict):
        raise PoolUnavailable(f"the router at {router} cleared no caches; it answered with status {answer.status_code}")
    return [
        f"the instance at {each} did not clear its own cache: {why}"
        for each, why in outcomes.items()
        if why != "success"
    ]


def find_pool_url(address: str) -> str:
    """Return the URL of the pool that an instance uses. Raises the same errors as ``read_instance``."""
    pool = _ask(address, "instance", "GET", "/kvcache").get("pool")
    url = pool.get("url") if isinstance(pool, dict) else None
    if not isinstance(url, str) or not url:
        raise PoolUnavailable(f"the instance at {address} does not report which pool it uses; give the pool as CONFIG")
    return url


def tokenize(address: str, body: Mapping[str, Any]) -> list[int]:
    """Let an instance convert a prompt to tokens, and return them. Raises the same errors as ``read_instance``.

    Args:
        address: address of the instance.
        body: JSON object with the prompt as the member ``prompt`` (a text) or ``messages``.
    """
    tokens = _ask(address, "instance", "POST", "/tokenize", body=body).get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise PoolUnavailable(f"the instance at {address} did not return a list of token ids from /tokenize")
    return tokens


def detokenize(address: str, tokens: Sequence[int]) -> str:
    """Let an instance convert tokens to text, and return the text. Raises the same errors as ``read_instance``."""
    text = _ask(address, "instance", "POST", "/detokenize", body={"tokens": list(tokens)}).get("prompt")
    return text if isinstance(text, str) else ""


def _authorise(token_file: Path | None) -> dict[str, str]:
    try:
        return {"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {}
    except ValueError as exc:
        raise ConfigError(f"--token-file {exc}") from None


def _ask(
    address: str, kind: str, method: str, path: str, *, body: object = None, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    answer, content = _request(address, kind, method, path, body=body, headers=headers)
    if answer.status_code == httpx.codes.OK and isinstance(content, dict):
        return content
    raise PoolUnavailable(f"the {kind} at {address} {_explain_refusal(answer, content)}")


def _request(
    address: str, kind: str, method: str, path: str, *, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[httpx.Response, object]:
    """Send a request; return the response and its JSON content. The content is None if it is not JSON.

    Args:
        kind: what the server is, for errors: ``instance`` or ``router``.
        body: the body, which is sent as JSON; None: no body.
    """
    try:
        url = parse_address(address).url
    except ValueError:
        raise ConfigError(f"--{kind} is {address!r}; it must be HOST:PORT, or http://HOST:PORT") from None
    try:
        answer = httpx.request(
            method, f"{url}{path}", json=body, headers=headers, timeout=_TIMEOUT_SECONDS, trust_env=False
        )
        content = answer.json() if answer.content else None
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise PoolUnavailable(f"no {kind} answers at {address}: {str(exc) or type(exc).__name__}") from None
    except ValueError:
        content = None
    return answer, content


def _explain_refusal(answer: httpx.Response, content: object) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if isinstance(message, str) and message.isprintable() and "no path" not in message:
        return f"answered with status {answer.status_code}: {message[:300]}"
    return f"answered with status {answer.status_code}: it is other software, or an older version"
