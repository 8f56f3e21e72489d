"""Creates messages to a gateway (changes of a head, pieces of a body, whole responses), and reads its messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.struct_pb2 import Struct

from router.epp.protos import (
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    ProcessingResponse,
    TrailersResponse,
)
from router.http import Headers

__all__ = [
    "CONTINUE",
    "DESTINATION",
    "change_head",
    "change_headers",
    "end_with_trailers",
    "make_immediate",
    "pass_on",
    "read_headers",
    "read_served",
    "read_subset",
    "send_to",
    "split_body",
]

DESTINATION = "x-gateway-destination-endpoint"
"""Name of the header and of the metadata with the chosen instance's address, ``ip:port``."""
_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_SERVED = "x-gateway-destination-endpoint-served"
# Maximum size of a piece of a streamed body, because some gateways allow at most 64 KB.
PIECE_BYTES = 62_000
_APPEND, _OVERWRITE = 0, 2  # values of the field append_action

_UNSAFE = re.compile(rb"[\r\n\0]")
_NOT_PRINTABLE = re.compile(rb"[^!-~]")
_OF_REQUEST_LINE = (b":path", b":method")

CONTINUE = ProcessingResponse(request_headers=HeadersResponse())
"""The answer to a request's headers. After this answer, the gateway collects the request's body, and then sends it."""


def read_headers(http_headers: Any) -> tuple[dict[bytes, bytes], Headers, bool]:
    """Return the pseudo-headers (such as ``:path``), the other headers, and whether no body follows.

    Raises:
        ValueError: a header is not valid in HTTP. Gateways check this, but other clients of the port may not.
    """
    pseudo: dict[bytes, bytes] = {}
    headers: Headers = []
    for header in http_headers.headers.headers:
        name, value = header.key.lower().encode(), header.raw_value or header.value.encode()
        unsafe_value = _NOT_PRINTABLE if name in _OF_REQUEST_LINE else _UNSAFE
        if _NOT_PRINTABLE.search(name) or unsafe_value.search(value):
            raise ValueError(f"the header {header.key[:80]!r} is not valid in HTTP")
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            headers.append((name, value))
    return pseudo, headers, http_headers.end_of_stream


def read_subset(message: Any) -> frozenset[str] | None:
    """Return the endpoints from which the gateway lets the picker choose; None if it may choose any endpoint.

    An endpoint is ``ip:port``. Some gateways omit the port, or write a list as one string.
    """
    hint = message.metadata_context.filter_metadata.get(_SUBSET_NAMESPACE)
    if hint is None or _SUBSET not in hint.fields:
        return None
    found = hint.fields[_SUBSET]
    listed = ",".join(each.string_value for each in found.list_value.values) or found.string_value
    return frozenset(each.strip() for each in listed.split(","))


def read_served(message: Any) -> str:
    """Return the endpoint to which the gateway has sent the request, if the gateway reports it; else ``""``."""
    metadata = message.metadata_context.filter_metadata.get(_NAMESPACE)
    return metadata.fields[_SERVED].string_value if metadata is not None and _SERVED in metadata.fields else ""


def change_headers(before: Headers, after: Headers) -> Any:
    """Return the changes that turn the headers ``before`` into the headers ``after``."""
    old, new = _group(before), _group(after)
    mutation = HeaderMutation(remove_headers=[name.decode("latin-1") for name in old if name not in new])
    for name, values in new.items():
        if old.get(name) != values:
            for place, value in enumerate(values):
                header = HeaderValue(key=name.decode("latin-1"), raw_value=value)
                mutation.set_headers.append(
                    HeaderValueOption(header=header, append_action=_APPEND if place else _OVERWRITE)
                )
    return mutation


def send_to(endpoint: str, mutation: Any, new_body: bytes | None, *, after_body: bool) -> Any:
    """Return the message that makes the gateway send a request to ``endpoint``.

    A header and metadata of the message name the endpoint.

    Args:
        endpoint: the address of the chosen instance.
        mutation: changes of the request's headers.
        new_body: the body that replaces a buffered body; None if the body does not change.
        after_body: whether the message responds to a buffered body. If not, it responds to the head.
    """
    header = HeaderValue(key=DESTINATION, raw_value=endpoint.encode())
    mutation.set_headers.append(HeaderValueOption(header=header, append_action=_OVERWRITE))
    common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
    if new_body is not None:
        common.body_mutation.body = new_body
    metadata = Struct()
    metadata.fields[_NAMESPACE].struct_value.fields[DESTINATION].string_value = endpoint
    if after_body:
        return ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=metadata)
    return ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)


def change_head(before: Headers, status: int, after: Headers) -> Any:
    """Return the message that changes the head of a response.

    Args:
        before: the headers that the gateway has reported.
        status: the new status.
        after: the new headers.
    """
    mutation = change_headers(before, after)
    header = HeaderValue(key=":status", raw_value=b"%d" % status)
    mutation.set_headers.append(HeaderValueOption(header=header, append_action=_OVERWRITE))
    return ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse(header_mutation=mutation)))


def split_body(data: bytes, *, is_request: bool, is_end: bool) -> Iterator[Any]:
    """Yield the messages with the pieces of a streamed body; no message if ``data`` is empty and the body continues."""
    starts = range(0, len(data), PIECE_BYTES) or ((0,) if is_end else ())
    for start in starts:
        piece = data[start : start + PIECE_BYTES]
        is_last = is_end and start + PIECE_BYTES >= len(data)
        mutation = {"streamed_response": {"body": bytes(piece), "end_of_stream": is_last}}
        response = BodyResponse(response=CommonResponse(body_mutation=mutation))
        yield ProcessingResponse(request_body=response) if is_request else ProcessingResponse(response_body=response)


def end_with_trailers(*, is_request: bool) -> Any:
    """Return the message after which the gateway forwards the trailers unchanged."""
    kind = "request_trailers" if is_request else "response_trailers"
    return ProcessingResponse(**{kind: TrailersResponse()})


def pass_on(message: Any) -> Iterable[Any]:
    """Return the answers to ``message`` with which the gateway forwards its own response unchanged.

    There are none if ``message`` is a part of the request, because the gateway has already responded to it.
    """
    kind = message.WhichOneof("request")
    if kind == "response_headers":
        return (ProcessingResponse(response_headers=HeadersResponse()),)
    if kind == "response_body":
        part = message.response_body
        return split_body(part.body, is_request=False, is_end=part.end_of_stream)
    return (end_with_trailers(is_request=False),) if kind == "response_trailers" else ()


def make_immediate(status: int, headers: Headers, body: bytes) -> Any:
    """Return the message that makes the gateway send this response to the client, without an instance."""
    response = {"status": {"code": status}, "headers": change_headers([], headers), "body": body}
    return ProcessingResponse(immediate_response={**response, "details": "kvrouter_epp"})


def _group(headers: Headers) -> dict[bytes, list[bytes]]:
    grouped: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        grouped.setdefault(name, []).append(value)
    return grouped
