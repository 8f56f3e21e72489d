"""HTTP/1.1: the server for clients, and pooled connections to instances. No other package speaks HTTP.

server.py       a client's connection: uvicorn's protocol, with a shorter path for the data plane
tls.py          TLS for connections from clients
cors.py         which web pages may use the router from a browser
exchange.py     one request to one instance and its response; the connection to an instance
pool.py         the connections to all instances
errors.py       why an exchange with an instance failed
api_error.py    the errors that a client gets, in OpenAI's format or in that of FastDeploy's routers
message.py      the parts of an HTTP message: address, headers, head
replies.py      responses of the control plane: JSON, and errors in the same format
body.py         the body of a request: parses it once, adds members to it; the token counts in a response
large_body.py   scans a large body before it is parsed
request_id.py   the id of a request, from the header X-Request-Id
"""

from router.http.api_error import ApiError, Refused, RequestEnded, encode_error_event, to_dialect
from router.http.body import (
    CONTROL_BYTES,
    InferenceBody,
    TokenCount,
    Usage,
    encode_member,
    estimate_tokens,
    find_model,
    parse_inference,
    parse_object,
    read_cached_figures,
    read_usage,
    rename_model,
    set_figures,
    splice_parts,
    whole_number,
)
from router.http.cors import Cors, find_foreign_page
from router.http.errors import (
    ConnectFailed,
    ConnectRefused,
    NameUnresolved,
    NoRoom,
    StaleConnection,
    TimedOut,
    UpstreamError,
)
from router.http.exchange import Exchange, ExchangeMaker, ExchangeRecord, Receiver, ResponseReader
from router.http.large_body import UNCHECKED_BYTES, BadBody, LargeBody, hide_escapes, show_escapes
from router.http.message import (
    HOP_BY_HOP,
    NOT_PASSED_BACK,
    Address,
    Headers,
    PreparedHead,
    Response,
    end_to_end,
    prepare_head,
)
from router.http.pool import ConnectionPool
from router.http.replies import error_reply, json_reply, refusal_reply
from router.http.request_id import MAX_ID_CHARACTERS, echo_request_id, encode_request_id, find_request_id
from router.http.server import ClientRequest, RouterProtocol, is_normal_path, path_of
from router.http.tls import ListenerContext

__all__ = [
    "CONTROL_BYTES",
    "HOP_BY_HOP",
    "MAX_ID_CHARACTERS",
    "NOT_PASSED_BACK",
    "UNCHECKED_BYTES",
    "Address",
    "ApiError",
    "BadBody",
    "ClientRequest",
    "ConnectFailed",
    "ConnectRefused",
    "ConnectionPool",
    "Cors",
    "Exchange",
    "ExchangeMaker",
    "ExchangeRecord",
    "Headers",
    "InferenceBody",
    "LargeBody",
    "ListenerContext",
    "NameUnresolved",
    "NoRoom",
    "PreparedHead",
    "Receiver",
    "Refused",
    "RequestEnded",
    "Response",
    "ResponseReader",
    "RouterProtocol",
    "StaleConnection",
    "TimedOut",
    "TokenCount",
    "UpstreamError",
    "Usage",
    "echo_request_id",
    "encode_error_event",
    "encode_member",
    "encode_request_id",
    "end_to_end",
    "error_reply",
    "estimate_tokens",
    "find_foreign_page",
    "find_model",
    "find_request_id",
    "hide_escapes",
    "is_normal_path",
    "json_reply",
    "parse_inference",
    "parse_object",
    "path_of",
    "prepare_head",
    "read_cached_figures",
    "read_usage",
    "refusal_reply",
    "rename_model",
    "set_figures",
    "show_escapes",
    "splice_parts",
    "to_dialect",
    "whole_number",
]
