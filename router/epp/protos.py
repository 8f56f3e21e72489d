"""The messages of Envoy's ext_proc (version 3) and of gRPC's health service, with the fields that the picker uses.

Other fields of a message are ignored. Enumerations are numbers. The two packages on PyPI with Envoy's messages cannot
be used: ``envoy-data-plane`` needs Python 3.11 and another runtime, and ``xds-protos`` overwrites modules of
OpenTelemetry's packages.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

__all__ = [
    "BUFFERED",
    "FULL_DUPLEX_STREAMED",
    "NOT_SERVING",
    "SERVING",
    "BodyResponse",
    "CommonResponse",
    "HeaderMutation",
    "HeaderValue",
    "HeaderValueOption",
    "HeadersResponse",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "HttpBody",
    "HttpHeaders",
    "HttpTrailers",
    "ProcessingRequest",
    "ProcessingResponse",
    "TrailersResponse",
]

BUFFERED, FULL_DUPLEX_STREAMED = 2, 4
"""Modes in which a gateway sends bodies."""
SERVING, NOT_SERVING = 1, 2
"""Values of ``status`` in the response of a health check."""

# Each line is a message with its fields: ``TYPE NAME = NUMBER``. ``*`` marks a repeated field, ``%`` a map with string
# keys. ``GROUP/`` is the oneof to which a field belongs.
_MESSAGES = """
HeaderValue: string key = 1, string value = 2, bytes raw_value = 3
HeaderMap: HeaderValue* headers = 1
HeaderValueOption: HeaderValue header = 1, int32 append_action = 3
Metadata: Struct% filter_metadata = 1
HttpHeaders: HeaderMap headers = 1, bool end_of_stream = 3
HttpBody: bytes body = 1, bool end_of_stream = 2
HttpTrailers: HeaderMap trailers = 1
ProtocolConfiguration: int32 request_body_mode = 1, int32 response_body_mode = 2
ProcessingRequest: request/HttpHeaders request_headers = 2, request/HttpHeaders response_headers = 3, \
request/HttpBody request_body = 4, request/HttpBody response_body = 5, request/HttpTrailers request_trailers = 6, \
request/HttpTrailers response_trailers = 7, Metadata metadata_context = 8, ProtocolConfiguration protocol_config = 11
HeaderMutation: HeaderValueOption* set_headers = 1, string* remove_headers = 2
StreamedBodyResponse: bytes body = 1, bool end_of_stream = 2
BodyMutation: mutation/bytes body = 1, mutation/StreamedBodyResponse streamed_response = 3
CommonResponse: HeaderMutation header_mutation = 2, BodyMutation body_mutation = 3, bool clear_route_cache = 5
HeadersResponse: CommonResponse response = 1
BodyResponse: CommonResponse response = 1
TrailersResponse: HeaderMutation header_mutation = 1
HttpStatus: int32 code = 1
ImmediateResponse: HttpStatus status = 1, HeaderMutation headers = 2, bytes body = 3, string details = 5
ProcessingResponse: response/HeadersResponse request_headers = 1, response/HeadersResponse response_headers = 2, \
response/BodyResponse request_body = 3, response/BodyResponse response_body = 4, \
response/TrailersResponse request_trailers = 5, response/TrailersResponse response_trailers = 6, \
response/ImmediateResponse immediate_response = 7, Struct dynamic_metadata = 8
HealthCheckRequest: string service = 1
HealthCheckResponse: int32 status = 1
"""
_PACKAGE = "kvrouter.epp"
_FIELD = re.compile(r"(?:(\w+)/)?(\w+)([*%]?) (\w+) = (\d+)")
_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
}


def _make_messages() -> dict[str, Any]:
    """Return the class of each message in ``_MESSAGES``, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="kvrouter_epp.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for line in _MESSAGES.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for group, kind, mark, field_name, number in _FIELD.findall(fields):
            field = message.field.add(name=field_name, number=int(number))
            field.label = _Field.LABEL_REPEATED if mark else _Field.LABEL_OPTIONAL
            if group:
                if not message.oneof_decl:
                    message.oneof_decl.add(name=group)
                field.oneof_index = 0
            if mark == "%":
                entry = message.nested_type.add(name=f"{field_name.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
                value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
                _set_type(value, kind)
                _set_type(field, f"{name}.{entry.name}")
            else:
                _set_type(field, kind)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}"))
        for message in file.message_type
    }


def _set_type(field: Any, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".{_PACKAGE}.{kind}"


_CLASSES = _make_messages()
BodyResponse: Any = _CLASSES["BodyResponse"]
CommonResponse: Any = _CLASSES["CommonResponse"]
HeaderMutation: Any = _CLASSES["HeaderMutation"]
HeaderValue: Any = _CLASSES["HeaderValue"]
HeaderValueOption: Any = _CLASSES["HeaderValueOption"]
HeadersResponse: Any = _CLASSES["HeadersResponse"]
HealthCheckRequest: Any = _CLASSES["HealthCheckRequest"]
HealthCheckResponse: Any = _CLASSES["HealthCheckResponse"]
HttpBody: Any = _CLASSES["HttpBody"]
HttpHeaders: Any = _CLASSES["HttpHeaders"]
HttpTrailers: Any = _CLASSES["HttpTrailers"]
ProcessingRequest: Any = _CLASSES["ProcessingRequest"]
ProcessingResponse: Any = _CLASSES["ProcessingResponse"]
TrailersResponse: Any = _CLASSES["TrailersResponse"]
