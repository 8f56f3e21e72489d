"""A client's request as the router serves it: parsed once, identified, and with the head for instances.

Clients send the same headers with each request of a connection, except the body's length. So a head is parsed once, and
its connection recognises it in later requests. A large body is scanned before it is parsed, while other requests
continue.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from router.http import (
    HOP_BY_HOP,
    MAX_ID_CHARACTERS,
    UNCHECKED_BYTES,
    ApiError,
    BadBody,
    ClientRequest,
    Headers,
    InferenceBody,
    LargeBody,
    PreparedHead,
    RequestEnded,
    encode_member,
    end_to_end,
    estimate_tokens,
    find_model,
    find_request_id,
    parse_inference,
    prepare_head,
    rename_model,
    whole_number,
)
from router.policies import RequestFeatures, find_session, request_features
from router.serving.reading.api import GENERATING, Api, EngineIds

__all__ = ["MAX_CLIENT_ID", "ParsedRequest", "RequestHead", "guess_ids", "is_large", "read_head", "scan_large_body"]

# With x-data-parallel-rank, a client could select a process of an engine and so bypass the router's policy.
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-data-parallel-rank"}
# The router reads the responses to completions. Each attempt has its own id, which is in its body.
_NOT_FORWARDED_WITH_COMPLETIONS = _NOT_FORWARDED | {b"accept-encoding", b"x-request-id"}

MAX_CLIENT_ID = 128
"""Number of stored characters of an id by which a client finds its request in logs; thousands of records are stored."""

_STORED_PATH = "/v1/responses/"
_NO_API = Api("", ())
# vLLM also takes members of pairs from ``vllm_xargs``, with these names.
_IN_EXTRA = frozenset(("kv_transfer_params", "ec_transfer_params"))


class RequestHead:
    """A parsed request head. Callers only read its attributes."""

    __slots__ = ("client_ids", "forwarded", "headers", "line", "sent_id", "session", "tag", "trace_id")

    def __init__(self, request: ClientRequest, tag: str = "") -> None:
        """
        Args:
            tag: suffix of the client's request ids at engines.

        Raises:
            BadBody: a header is invalid.
        """
        self.line = (request.method, request.target)
        """Method and target."""
        self.headers: Headers = request.headers
        self.sent_id = find_request_id(request.headers)
        """The id that the client gave the request; ``""`` if none."""
        self.trace_id = ""
        """The W3C trace context in the request."""
        self.session = find_session(request.headers)
        """The session named in the request."""
        self.client_ids: dict[str, str] = {"session_id": self.session[:MAX_CLIENT_ID]} if self.session else {}
        """The ids by which its client finds it in logs, by their names there; not to be changed."""
        for name, value in request.headers:
            if name == b"traceparent":
                self.trace_id = value[3:35].decode("latin-1")
            elif name == b"x_bd_logid" and value:  # from FastDeploy's Go router
                self.client_ids["x_bd_logid"] = value[:MAX_CLIENT_ID].decode("latin-1")
        is_completion = request.path in GENERATING
        dropped = _NOT_FORWARDED_WITH_COMPLETIONS if is_completion else _NOT_FORWARDED
        passed = [each for each in end_to_end(request.headers, dropped) if not each[0].startswith(b"x-router-")]
        if tag:
            passed = [(name, value + tag.encode() if name == b"x-request-id" else value) for name, value in passed]
        self.tag = tag
        self.forwarded: PreparedHead = prepare_head(*self.line, passed)
        """The head for instances, before header lines for a specific instance are added."""


def read_head(request: ClientRequest, tag: str = "") -> RequestHead:
    """Return the head of a request. If it equals the one of the previous request, that is reused.

    Args:
        tag: suffix of the client's request ids at engines.

    Raises:
        BadBody: a header is invalid.
    """
    known, line = request.known_head, (request.method, request.target)
    if isinstance(known, RequestHead) and known.line == line and known.headers == request.headers and known.tag == tag:
        return known
    head = RequestHead(request, tag)
    request.keep_head(head)
    return head


class ParsedRequest:
    """A parsed request. Callers only read its attributes."""

    __slots__ = (
        "api",
        "body",
        "cache_salt",
        "client_ids",
        "data",
        "features",
        "head",
        "model",
        "request_id",
        "stored_id",
        "wants_stream",
    )

    def __init__(
        self,
        request: ClientRequest,
        head: RequestHead,
        large: LargeBody | None,
        derive_salt: Callable[[str], str] | None,
        aliases: Mapping[str, str],
    ) -> None:
        """Parse the body if an answer is to be generated.

        Args:
            head: its head.
            large: the scanned body, if it is large.
            derive_salt: returns the salt that separates the client's cache, for a salt that the client sent, or "".
            aliases: the model of each alias.

        Raises:
            RequestEnded: the request cannot be served.
        """
        self.data = request.body
        self.head = head.forwarded
        self.body: InferenceBody | None = None
        """The parsed body of a request whose answer is generated."""
        self.cache_salt = b""
        """The member that separates the client's cache, if there is one."""
        self.model = b""
        """The member that names its model, if the client used an alias."""
        self.api: Api = _NO_API
        """The endpoint of a request whose answer is generated."""
        self.stored_id = ""
        """Id of the earlier answer that it continues or accesses."""
        self.wants_stream = False
        self.client_ids: Mapping[str, str] = head.client_ids
        """The ids by which its client finds it in logs, by their names there."""
        if request.path not in GENERATING:
            self.request_id = head.sent_id or _make_request_id()
            model = find_model(request.body)
            if model in aliases:
                model = aliases[model]
                self.data = rename_model(request.body, model)
            self.features = RequestFeatures(estimate_tokens(request.body), model=model)
            if request.path.startswith(_STORED_PATH):
                self.stored_id = request.path[len(_STORED_PATH) :].partition("/")[0]
        elif request.method != "POST":
            message = f"{request.path} takes POST, not {request.method}"
            raise RequestEnded(ApiError(405, message, "method_not_allowed"))
        else:
            self._read_generation(request, head, large, derive_salt, aliases)

    def _read_generation(
        self,
        request: ClientRequest,
        head: RequestHead,
        large: LargeBody | None,
        derive_salt: Callable[[str], str] | None,
        aliases: Mapping[str, str],
    ) -> None:
        """Parse the body of a generating request; arguments as in ``__init__``."""
        self.api = GENERATING[request.path]
        try:
            self.body = body = parse_inference(request.body, large)
        except BadBody as exc:
            raise RequestEnded(_explain_bad_body(request, exc)) from None
        if len(body.request_id or "") > MAX_ID_CHARACTERS:
            message = f"request_id is longer than the {MAX_ID_CHARACTERS} characters this router takes"
            raise RequestEnded(ApiError(400, message, "invalid_body", "request_id"))
        members: Mapping[str, Any] = body.members
        extra = members.get("vllm_xargs")
        if isinstance(extra, dict) and not _IN_EXTRA.isdisjoint(extra):
            message = (
                "vllm_xargs has kv_transfer_params or ec_transfer_params, which only the router sets: leave them out"
            )
            raise RequestEnded(ApiError(400, message, "invalid_body", "vllm_xargs"))
        if aliases:
            members = self._resolve_alias(aliases, members)
        if derive_salt is not None:
            members = self._salt_cache(derive_salt, members)
        self.wants_stream = bool(members.get("stream"))
        if self.api.stores_answers:
            previous = members.get("previous_response_id")
            self.stored_id = previous if isinstance(previous, str) else ""
        self.features = request_features(members, body.prompt_tokens, head.session, len(body.data))
        self.request_id = body.request_id or head.sent_id or _make_request_id()
        if "req_id" in members or "session_id" in members or "extra_body" in members:
            self.client_ids = {**_list_ids(members, self.features.key), **head.client_ids}

    @property
    def samples(self) -> int:
        """Number of answers per prompt."""
        assert self.body is not None
        return whole_number(self.body.members.get("n")) or 1

    @property
    def is_batch(self) -> bool:
        """Whether it has a list of prompts, even of only one, for engines other than FastDeploy."""
        prompts = self._find_prompts()
        return isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)

    @property
    def num_prompts(self) -> int:
        """Number of prompts, for engines other than FastDeploy."""
        return len(self._find_prompts()) if self.body is not None and self.is_batch else 1

    def _find_prompts(self) -> Any:
        """Return the prompt, or prompts. Engines other than FastDeploy know only this one of the two names."""
        assert self.body is not None
        return self.body.members.get("prompt") or self.body.members.get("prompt_token_ids")

    def name_at_engines(self, request_id: str) -> EngineIds:
        """Return the ids of its sequences at FastDeploy's engines, if its answer is generated with this id."""
        return EngineIds(self.api.id_prefix, request_id, self.body.choices if self.body else 1)

    def _resolve_alias(self, aliases: Mapping[str, str], members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace an alias by its model; return the body's members with it."""
        name = members.get("model")
        model = aliases.get(name) if isinstance(name, str) else None
        if model is None:
            return members
        self.model = encode_member("model", model)
        return {**members, "model": model}

    def _salt_cache(self, derive_salt: Callable[[str], str], members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the client's salt to the request; return the body's members with it.

        Raises:
            RequestEnded: the salt that the client sent is invalid.
        """
        own = members.get("cache_salt")
        if not isinstance(own, str | None):
            message = "cache_salt must be text"
            raise RequestEnded(ApiError(400, message, "invalid_body", "cache_salt"))
        salt = derive_salt(own or "")
        self.cache_salt = encode_member("cache_salt", salt)
        return {**members, "cache_salt": salt}


def _explain_bad_body(request: ClientRequest, fault: BadBody) -> ApiError:
    """Return why a body could not be read; for an encoded one, see RFC 9110, 8.4 and 15.5.16."""
    for name, value in request.headers:
        if name == b"content-encoding" and value.lower() != b"identity":
            message = f"the body is encoded ({value.decode('latin-1')}); this router takes bodies as they are"
            return ApiError(415, message, "encoded_body")
    return ApiError(400, str(fault), "invalid_body", fault.param)


def guess_ids(request: ClientRequest) -> EngineIds:
    """Return the ids of a request that has to be queued. Its body is parsed only if it may have its own id."""
    body, request_id = None, ""
    try:
        if len(request.body) <= UNCHECKED_BYTES and b'"request_id"' in request.body:
            body = parse_inference(request.body)
            request_id = body.request_id or ""
        request_id = request_id or find_request_id(request.headers)
    except BadBody:
        pass  # expected: an unreadable request has no ids; it is refused when it is read in its turn
    return EngineIds(GENERATING[request.path].id_prefix, request_id, body.choices if body else 1)


def _list_ids(members: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return the ids in a body that are for its client's own use.

    Args:
        key: its session or user.
    """
    session = key if key != members.get("user") else ""
    ids = {"req_id": members.get("req_id"), "session_id": session}
    return {
        # JSON may contain half a surrogate pair, which logs and spans cannot.
        name: value[:MAX_CLIENT_ID].encode(errors="replace").decode()
        for name, value in ids.items()
        if isinstance(value, str) and value
    }


def _make_request_id() -> str:
    """Return a random UUID of version 4, without ``uuid``, which makes a system call for each."""
    text = random.getrandbits(128).to_bytes(16, "big").hex()  # formatting the number takes twice as long
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def is_large(request: ClientRequest) -> bool:
    """Return whether the body takes so long to parse that it is scanned first."""
    return len(request.body) > UNCHECKED_BYTES and request.path in GENERATING


async def scan_large_body(request: ClientRequest) -> LargeBody:
    """Scan a large body, and let other requests run meanwhile.

    Raises:
        RequestEnded: parsing would take too long.
    """
    large = LargeBody(request.body)
    try:
        for _ in large.check_values():
            await asyncio.sleep(0)
        large.prompt_tokens = estimate_tokens(request.body)
        await asyncio.sleep(0)
    except BadBody as exc:
        raise RequestEnded(ApiError(400, str(exc), "invalid_body", exc.param)) from None
    return large
