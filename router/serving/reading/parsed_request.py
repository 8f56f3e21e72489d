"""ParsedRequest: a client's request, parsed once, with its ids and with the head for instances.

A client usually sends the same headers with each request of a connection, except the length of the body. So a parsed
head is stored with the connection, and used again for later requests with equal headers. A large body is scanned before
it is parsed, while other requests continue.
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
from router.policies import RequestFeatures, request_features
from router.serving.reading.api import GENERATING, Api, EngineIds
from router.serving.reading.sessions import SessionHeaders

__all__ = ["MAX_CLIENT_ID", "ParsedRequest", "RequestHead", "guess_ids", "is_large", "read_head", "scan_large_body"]

# Headers that are not forwarded. With x-data-parallel-rank, a client could bypass the router's policy.
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-data-parallel-rank"}
# For completions, responses must not be compressed, because the router reads them. The id of an attempt is in its body.
_NOT_FORWARDED_WITH_COMPLETIONS = _NOT_FORWARDED | {b"accept-encoding", b"x-request-id"}

MAX_CLIENT_ID = 128
"""Longer ids of clients are cut to this number of characters, because thousands of records are stored."""

_SESSION_IDS = ("session_id", "parent_session_id")
_STORED_PATH = "/v1/responses/"
_NO_API = Api("", ())
# Members for the legs of a pair that vLLM also reads from ``vllm_xargs``.
_IN_EXTRA = frozenset(("kv_transfer_params", "ec_transfer_params"))


class RequestHead:
    """The parsed head (request line and headers) of a client's request. Other code only reads its attributes."""

    __slots__ = ("client_ids", "forwarded", "headers", "line", "sent_id", "session", "tag", "trace_id")

    def __init__(self, request: ClientRequest, sessions: SessionHeaders, tag: str = "") -> None:
        """
        Args:
            request: the client's request.
            sessions: the headers that name a session.
            tag: suffix of the client's request ids at engines.

        Raises:
            BadBody: a header is invalid.
        """
        self.line = (request.method, request.target)
        """Method and target of the request."""
        self.headers: Headers = request.headers
        self.sent_id = find_request_id(request.headers)
        """The id in the header ``X-Request-Id``; ``""`` if there is none."""
        self.trace_id = ""
        """The trace id in the W3C trace context of the request; ``""`` if there is none."""
        self.session = sessions.find_session(request.headers)
        """The session that the headers name."""
        self.client_ids: dict[str, str] = {
            name: value[:MAX_CLIENT_ID] for name, value in zip(_SESSION_IDS, self.session, strict=True) if value
        }
        """Ids from the client's headers, by their names in the access log. Several requests share this dictionary."""
        for name, value in request.headers:
            if name == b"traceparent":
                self.trace_id = value[3:35].decode("latin-1")
            elif name == b"x_bd_logid" and value:  # a header of FastDeploy's Go router
                self.client_ids["x_bd_logid"] = value[:MAX_CLIENT_ID].decode("latin-1")
        is_completion = request.path in GENERATING
        dropped = _NOT_FORWARDED_WITH_COMPLETIONS if is_completion else _NOT_FORWARDED
        passed = [each for each in end_to_end(request.headers, dropped) if not each[0].startswith(b"x-router-")]
        if tag:
            passed = [(name, value + tag.encode() if name == b"x-request-id" else value) for name, value in passed]
        self.tag = tag
        self.forwarded: PreparedHead = prepare_head(*self.line, passed)
        """The head for instances, without the header lines that depend on the instance."""


def read_head(request: ClientRequest, sessions: SessionHeaders, tag: str = "") -> RequestHead:
    """Return the parsed head of a request. If the connection has stored an equal head, return the stored head.

    Args:
        request: the client's request.
        sessions: the headers that name a session.
        tag: suffix of the client's request ids at engines.

    Raises:
        BadBody: a header is invalid.
    """
    known, line = request.known_head, (request.method, request.target)
    if isinstance(known, RequestHead) and known.line == line and known.headers == request.headers and known.tag == tag:
        return known
    head = RequestHead(request, sessions, tag)
    request.keep_head(head)
    return head


class ParsedRequest:
    """A parsed request. Other code only reads its attributes."""

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
        """Parse a request. The body is parsed only if the endpoint generates tokens.

        Args:
            request: the client's request.
            head: the parsed head.
            large: the scanned body, if it is large.
            derive_salt: called with the salt that the client sent, or ``""``. Returns the salt for the client's cache.
                None if the clients' caches are not separated.
            aliases: for each alias, the name of its model.

        Raises:
            RequestEnded: the request cannot be served.
        """
        self.data = request.body
        self.head = head.forwarded
        self.body: InferenceBody | None = None
        """The parsed body; None if the endpoint does not generate tokens."""
        self.cache_salt = b""
        """The member ``cache_salt`` that the router adds; ``b""`` if it adds none."""
        self.model = b""
        """The member ``model`` with the model's name if the client sent an alias; else ``b""``."""
        self.api: Api = _NO_API
        """Properties of the endpoint's bodies; an empty ``Api`` if the endpoint generates no tokens."""
        self.stored_id = ""
        """Id of the stored response that the request continues or accesses; ``""`` if there is none."""
        self.wants_stream = False
        self.client_ids: Mapping[str, str] = head.client_ids
        """Ids from the client's headers and body, by their names in the access log, such as ``session_id``."""
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
            message = f"{request.path} accepts POST, not {request.method}"
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
        """Parse the body of a request for which tokens are generated. ``__init__`` describes the arguments."""
        self.api = GENERATING[request.path]
        try:
            self.body = body = parse_inference(request.body, large)
        except BadBody as exc:
            raise RequestEnded(_explain_bad_body(request, exc)) from None
        if len(body.request_id or "") > MAX_ID_CHARACTERS:
            message = f"request_id is longer than the {MAX_ID_CHARACTERS} characters that this router accepts"
            raise RequestEnded(ApiError(400, message, "invalid_body", "request_id"))
        members: Mapping[str, Any] = body.members
        extra = members.get("vllm_xargs")
        if isinstance(extra, dict) and not _IN_EXTRA.isdisjoint(extra):
            message = (
                "vllm_xargs has kv_transfer_params or ec_transfer_params; leave them out, because only the "
                "router sets them"
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
        self.features = request_features(members, body.prompt_tokens, *head.session, num_bytes=len(body.data))
        self.request_id = body.request_id or head.sent_id or _make_request_id()
        if "req_id" in members or "session_id" in members or "extra_body" in members:
            self.client_ids = {**_list_ids(members, self.features.key), **head.client_ids}

    @property
    def samples(self) -> int:
        """Number of sequences to generate for each prompt."""
        assert self.body is not None
        return whole_number(self.body.members.get("n")) or 1

    @property
    def is_batch(self) -> bool:
        """Whether the request has a list of prompts, which may have only one entry.

        Do not use this for FastDeploy, where a list may be a single prompt.
        """
        prompts = self._find_prompts()
        return isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)

    @property
    def num_prompts(self) -> int:
        """Number of prompts. Do not use this for FastDeploy; see ``is_batch``."""
        return len(self._find_prompts()) if self.body is not None and self.is_batch else 1

    def _find_prompts(self) -> Any:
        """Return the prompt or the prompts. ``prompt`` has priority over ``prompt_token_ids``, unlike in FastDeploy."""
        assert self.body is not None
        return self.body.members.get("prompt") or self.body.members.get("prompt_token_ids")

    def name_at_engines(self, request_id: str) -> EngineIds:
        """Return the ids of the request's sequences at FastDeploy's engines, if it is sent with this ``request_id``."""
        return EngineIds(self.api.id_prefix, request_id, self.body.choices if self.body else 1)

    def _resolve_alias(self, aliases: Mapping[str, str], members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace an alias in the body's members by the name of its model. Return the changed members."""
        name = members.get("model")
        model = aliases.get(name) if isinstance(name, str) else None
        if model is None:
            return members
        self.model = encode_member("model", model)
        return {**members, "model": model}

    def _salt_cache(self, derive_salt: Callable[[str], str], members: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the salt for the client's cache to the body's members. Return the changed members."""
        own = members.get("cache_salt")
        if not isinstance(own, str | None):
            message = "cache_salt must be text"
            raise RequestEnded(ApiError(400, message, "invalid_body", "cache_salt"))
        salt = derive_salt(own or "")
        self.cache_salt = encode_member("cache_salt", salt)
        return {**members, "cache_salt": salt}


def _explain_bad_body(request: ClientRequest, fault: BadBody) -> ApiError:
    """Return the error for a body that could not be parsed. For an encoded body, see RFC 9110, 8.4 and 15.5.16."""
    for name, value in request.headers:
        if name == b"content-encoding" and value.lower() != b"identity":
            message = (
                f"the body has the content encoding {value.decode('latin-1')}; this router accepts only "
                "bodies without one"
            )
            return ApiError(415, message, "encoded_body")
    return ApiError(400, str(fault), "invalid_body", fault.param)


def guess_ids(request: ClientRequest) -> EngineIds:
    """Return the ids of a request that is queued, for an abort. Its body is parsed only if it may contain an id."""
    body, request_id = None, ""
    try:
        if len(request.body) <= UNCHECKED_BYTES and b'"request_id"' in request.body:
            body = parse_inference(request.body)
            request_id = body.request_id or ""
        request_id = request_id or find_request_id(request.headers)
    except BadBody:
        pass  # an invalid request has no ids; it is refused when it is parsed later
    return EngineIds(GENERATING[request.path].id_prefix, request_id, body.choices if body else 1)


def _list_ids(members: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return the ids in a body that clients use to find their requests in logs.

    Args:
        members: the members of the body.
        key: the session or user of the request.
    """
    session = key if key != members.get("user") else ""
    ids = {"req_id": members.get("req_id"), "session_id": session}
    return {
        # JSON may contain half a surrogate pair, but logs and spans cannot.
        name: value[:MAX_CLIENT_ID].encode(errors="replace").decode()
        for name, value in ids.items()
        if isinstance(value, str) and value
    }


def _make_request_id() -> str:
    """Return a random UUID of version 4. The module ``uuid`` is not used: it makes a system call for each id."""
    text = random.getrandbits(128).to_bytes(16, "big").hex()  # formatting the number takes twice as long
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def is_large(request: ClientRequest) -> bool:
    """Return whether the body is so large that it is scanned before it is parsed."""
    return len(request.body) > UNCHECKED_BYTES and request.path in GENERATING


async def scan_large_body(request: ClientRequest) -> LargeBody:
    """Scan a large body. Other requests run between the steps.

    Raises:
        RequestEnded: the body would take too long to parse.
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
