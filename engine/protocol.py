"""Checks bodies of requests to OpenAI's completions API, and builds usage and error objects (also Anthropic's errors).

Unknown fields are ignored, because clients send many fields that do not change the answer. A field that would change
the answer and that this engine does not support is refused, unless its value changes nothing. A field with ``null``
counts as missing. The field ``model`` is not checked, because an instance serves one model (FastDeploy does not check
it either).
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from engine.scheduling.cache_hints import CacheControl, CacheOptions
from engine.scheduling.request import GREATEST_PENALTY, LEAST_PENALTY, SamplingDefaults, SamplingParams

__all__ = [
    "MAX_ANSWERS",
    "MAX_STOPS",
    "AbortBody",
    "ApiError",
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationBody",
    "RequestId",
    "TokenizeBody",
    "Unsupported",
    "anthropic_error_body",
    "build_usage",
    "check_body",
    "check_text_content",
    "error_body",
    "join_texts",
    "name_field",
    "parse_body",
    "quote_short",
    "sampling_params",
]


MAX_CHOICES = 128  # OpenAI's limit
MAX_ANSWERS = 1024
"""Maximum number of answers to one request, for all of its prompts together. The router has the same limit."""
MAX_STOPS = 16  # maximum number of stop strings; OpenAI accepts 4
# An id is logged and returned in a header. A router accepts 256 characters, and appends an index to retries.
_MAX_ID_CHARACTERS = 300

Unsupported: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Names of unsupported fields, each with the values that change nothing, and the explanation for all other values."""

_NO_FORM = "this engine does not support structured output; describe the format in the prompt, and check the answer"
_OWN_LOGPROBS = "this engine reports probabilities before sampling settings apply; leave the field out"
_TEMPLATE_VARIABLE = "it is a variable of some chat templates; give it in chat_template_kwargs"
# ``GenerationBody`` refuses further fields by their types, such as ``best_of: Literal[1]``.
_UNSUPPORTED: Unsupported = {
    "allowed_token_ids": (([],), "this engine samples from all tokens; leave the field out"),
    "bad_words": (([],), "this engine cannot ban words; leave the field out"),
    "bad_words_token_ids": (([],), "this engine cannot ban words; leave the field out"),
    "custom_logit_processor": ((), "this engine does not support logits processors; leave the field out"),
    "custom_params": (({},), "this engine does not support logits processors; leave the field out"),
    "extra_key": ((), "this engine separates caches by cache_salt; give cache_salt"),
    **dict.fromkeys(
        (
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag", "structured_outputs"),
            *("json_schema", "regex", "ebnf"),
        ),
        ((), _NO_FORM),
    ),
    "guided_json_object": (
        (False,),
        "this engine does not support structured output; ask for JSON in the prompt, and check the answer",
    ),
    "include_logprobs_decode_token": ((True,), "this engine reports tokens as texts; give true"),
    "include_stop_str_in_output": ((False,), "this engine always omits the stop string; give false"),
    "length_penalty": ((1,), "this engine does not support beam search; leave the field out"),
    "logits_processors": (([],), "this engine does not support logits processors; leave the field out"),
    "logits_processors_args": (({},), "this engine does not support logits processors; leave the field out"),
    "logprob_token_ids": (([],), "this engine reports only the most likely tokens; give only logprobs"),
    "lora_path": ((), "this engine does not support adapters; leave the field out"),
    "no_stop_trim": ((False,), "this engine always omits the stop string; give false"),
    "prompt_embeds": (([],), "this engine accepts texts and token ids; give one of them"),
    "prompt_logprobs": ((False,), "this engine reports probabilities only for the answer; leave the field out"),
    "reasoning_max_tokens": ((), "this engine does not separate reasoning from the answer; give max_tokens"),
    "repetition_detection": ((), "this engine does not detect repetitions; give repetition_penalty"),
    "response_max_tokens": ((), "this engine does not separate reasoning from the answer; give max_tokens"),
    "return_tokens_as_token_ids": (
        (False,),
        "this engine reports tokens as texts; give return_token_ids for their ids",
    ),
    "sampling_logprobs_mode": ((), _OWN_LOGPROBS),
    "session_params": ((), "this engine stores no sessions; send the whole prompt"),
    "skip_special_tokens": ((True,), "this engine always omits special tokens; give true"),
    "spaces_between_special_tokens": ((True,), "this engine always omits special tokens; give true"),
    "stop_regex": (([],), "this engine compares only texts; give stop"),
    "temp_scaled_logprobs": ((False,), _OWN_LOGPROBS),
    "thinking_token_budget": ((-1,), "this engine does not separate reasoning from the answer; give max_tokens"),
    "top_p_normalized_logprobs": ((False,), _OWN_LOGPROBS),
    "truncate_prompt_tokens": ((), "this engine does not truncate prompts; send one that fits"),
    "use_beam_search": ((False,), "this engine does not support beam search; give false"),
    "vllm_xargs": (({},), "this engine does not support extensions; leave the field out"),
    "watermark": (({}, {"enabled": False}), "this engine does not support watermarks; leave the field out"),
    "watermarking": ((False,), "this engine does not support watermarks; leave the field out"),
}
_UNSUPPORTED_IN_CHAT: Unsupported = {
    "audio": ((), "this engine answers in text only; leave the field out"),
    "chat_template": ((), "this engine renders messages by the checkpoint's own template; leave the field out"),
    "disable_chat_template": ((False,), "this engine renders messages by the template; use /v1/completions for a text"),
    "documents": (([],), "this engine passes no documents to templates; put them into the messages"),
    "echo": ((False,), "this engine does not repeat the prompt; give false"),
    "enable_thinking": ((), "it is a variable of chat templates; give it in chat_template_kwargs"),
    "function_call": (("none", "auto"), 'this engine cannot force a call; give "auto" or "none"'),
    "functions": (([],), "this engine does not support functions; give tools"),
    "include_reasoning": ((True,), "this engine does not separate reasoning from the answer; give true"),
    "input_ids": (([],), "this engine accepts them as prompt_token_ids; give that"),
    "modalities": ((["text"],), 'this engine answers in text only; give ["text"]'),
    "moderation": ((), "this engine does not support moderation; leave the field out"),
    "prediction": ((), "this engine does not compare answers with a prediction; leave the field out"),
    "reasoning_effort": ((), _TEMPLATE_VARIABLE),
    "task": ((), "this engine does not support tasks; put it into the messages"),
    "thinking": (({"type": "disabled"},), _TEMPLATE_VARIABLE),
    "tool_choice": (("none", "auto"), 'this engine cannot force a call; give "auto" or "none"'),
    "verbosity": (("medium",), "this engine does not support verbosity; ask for it in the messages"),
    "web_search_options": ((), "this engine does not support search; leave the field out"),
}


class ApiError(Exception):
    """An error response to a request: an HTTP status and a message of one sentence.

    ``param`` is the name of the field that is wrong, if it is one field. ``code`` is OpenAI's error code; its default
    is ``invalid_value`` if the status is 400 and ``param`` is given.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or ("invalid_value" if status == 400 and param else None)  # as in FastDeploy

    def rename_param(self, names: Mapping[str, str]) -> ApiError:
        """Return the same error with another name of the field; ``names`` maps chat's names to another API's names."""
        name, dot, rest = (self.param or "").partition(".")
        if name not in names:
            return self
        message = str(self)
        if message.startswith(name):
            message = names[name] + message[len(name) :]
        return ApiError(self.status, message, param=f"{names[name]}{dot}{rest}", code=self.code)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response, in OpenAI's format."""
        return error_body(self.status, str(self), param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's error object for an HTTP status; its ``type`` is one of FastDeploy's."""
    kind = "invalid_request_error" if 400 <= status < 500 else "internal_error"
    kind = "timeout_error" if status == 408 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_ANTHROPIC_KINDS = {404: "not_found_error", 413: "request_too_large"}


def anthropic_error_body(status: int, message: str) -> dict[str, Any]:
    """Return Anthropic's error object for an HTTP status."""
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, kind), "message": message}}


def _stop_at_first_error(schema: Any) -> None:
    """Set ``fail_fast`` in the schemas of lists and objects that ``schema`` contains."""
    if isinstance(schema, dict) and schema.get("type") in ("list", "dict"):
        schema["fail_fast"] = True
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ():
        _stop_at_first_error(part)


class Body(BaseModel):
    """Base class of request bodies. Fields that a subclass does not define are ignored."""

    model_config = ConfigDict(extra="ignore", strict=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return pydantic's schema, which checks each list or object of a body only up to its first wrong element.

        With an error for each element, a body of 2 MB would take 12 s and 2 GB of memory.
        """
        schema = handler(source)
        _stop_at_first_error(schema)
        return schema

    unsupported: ClassVar[Unsupported] = {}
    """The fields that are refused, unless their value changes nothing."""

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        """Raise ``ApiError`` if one of the ``unsupported`` fields has a value that would change the answer."""
        for name, value in fields.items():
            harmless, explanation = cls.unsupported.get(name, ((value,), ""))
            if value is not None and value not in harmless:
                raise ApiError(400, f"{name}: it is {quote_short(value)}, but {explanation}", param=name)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        """Remove the fields that are null, because OpenAI's schema lets clients write null for a missing field."""
        return {name: v for name, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


def _check_printable(request_id: str) -> str:
    """Check that the request's id has only printable characters, because the id is logged."""
    if not request_id.isprintable():
        raise PydanticCustomError("not_printable", "Input should be printable characters")
    return request_id


RequestId: TypeAlias = Annotated[str, Field(max_length=_MAX_ID_CHARACTERS), AfterValidator(_check_printable)]


class StreamOptions(Body):
    """The field ``stream_options``: whether a stream has usage at its end, or in each event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class DisaggregateInfo(Body):
    """FastDeploy's field ``disaggregate_info``: the pair that the router chose.

    Only members that are used are defined.
    """

    prefill_ip: str | None = None
    decode_ip: str | None = None
    decode_connector_port: int | None = Field(default=None, ge=1, le=65535)


class ResponseFormat(Body):
    """The field ``response_format``; only plain text is supported."""

    type: Literal["text"] = "text"


class _Function(Body):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(Body):
    type: Literal["function"] = "function"
    function: _Function


def _check_tool(tool: Any, check: Callable[[Any], object]) -> Any:
    """Check a tool, but return the client's own object: the chat template shows all of its members."""
    check(tool)
    return tool


class GenerationBody(Body):
    """The fields that chat completions and plain completions have in common."""

    unsupported: ClassVar[Unsupported] = _UNSUPPORTED

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    best_of: Literal[1] = 1
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    repetition_penalty: float | None = Field(default=None, ge=LEAST_PENALTY, le=GREATEST_PENALTY)
    min_p: Literal[0] = 0
    logit_bias: dict[str, Literal[0]] = {}
    response_format: ResponseFormat | None = None
    user: str | None = None
    completion_token_ids: list[int] | None = None
    """FastDeploy's field for resumption: tokens that another instance generated. They are appended to the prompt."""
    return_token_ids: bool = False
    cache_salt: str | None = Field(default=None, min_length=1)
    cache_control: CacheControl | None = None
    """How long to cache the prompt's blocks. A message, or a part of its content, may also have this field."""
    prompt_cache_key: str | None = None
    """OpenAI's field that is equal in requests with a common prefix. Only the router uses it."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """OpenAI's older field for how long to cache the prompt's blocks."""
    prompt_cache_options: CacheOptions | None = None
    """OpenAI's newer field for how long to cache the prompt's blocks; it overrides ``prompt_cache_retention``."""
    request_id: RequestId | None = None
    disaggregate_info: DisaggregateInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """vLLM's field by which decode finds the prompt's KV at prefill. SGLang has the four fields below for this."""
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    rid: Any = None

    @property
    def cache_seconds(self) -> float:
        """Number of seconds to cache the whole prompt; 0: the request has no hint for the whole prompt."""
        if self.cache_control is not None:
            return self.cache_control.seconds
        if self.prompt_cache_options is not None:
            return self.prompt_cache_options.seconds if self.prompt_cache_options.mode == "implicit" else 0.0
        return 24 * 3600.0 if self.prompt_cache_retention == "24h" else 0.0

    @field_validator("stop")
    @classmethod
    def _limit_stops(cls, stop: str | list[str]) -> str | list[str]:
        """Check that there are not too many stop strings: each new token's text is searched for all of them."""
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise PydanticCustomError("too_long", f"Input should be at most {MAX_STOPS} strings")
        return stop

    @field_validator("stream_options")
    @classmethod
    def _require_stream(cls, options: StreamOptions, info: ValidationInfo) -> StreamOptions:
        """Refuse stream options without ``stream: true``."""
        if options.model_fields_set and not info.data.get("stream"):
            raise PydanticCustomError("no_stream", "Stream options can only be defined when `stream=True`")
        return options

    def num_logprobs(self) -> int | None:
        """Return the number of alternatives to report for each token, or None to report no log probabilities."""
        return None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    unsupported: ClassVar[Unsupported] = {**_UNSUPPORTED, **_UNSUPPORTED_IN_CHAT}

    messages: list[dict[str, Any]] = Field(min_length=1)
    prompt_token_ids: list[int] | None = None
    """The tokens of the prompt; if they are given, ``messages`` is not rendered."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[Annotated[_Tool, WrapValidator(_check_tool)]] | None = None
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = False
    """Whether to add the tokenizer's special tokens to those that the chat template writes."""

    @field_validator("top_logprobs")
    @classmethod
    def _require_logprobs(cls, count: int, info: ValidationInfo) -> int:
        """Refuse ``top_logprobs`` above 0 without ``logprobs: true``."""
        if count and not info.data.get("logprobs"):
            raise PydanticCustomError("no_logprobs", "Input should come with logprobs: true")
        return count

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions, with one or several prompts."""

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    prompt_token_ids: list[int] | list[list[int]] | None = None
    """FastDeploy's field: the tokens of the prompts; if they are given, ``prompt`` is ignored."""
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = True
    """Whether to add the tokenizer's special tokens to a prompt that is a text."""

    @field_validator("prompt", "prompt_token_ids", mode="before")
    @classmethod
    def _limit_prompts(cls, given: Any) -> Any:
        """Refuse too many prompts before each of them is checked."""
        if isinstance(given, list) and len(given) > MAX_ANSWERS and isinstance(given[0], str | list):
            raise PydanticCustomError("too_long", f"Input should be at most {MAX_ANSWERS} prompts")
        return given

    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeBody(Body):
    """The body of POST /tokenize, as in vLLM: a text, or messages.

    All other fields are those of a completion with this text, or of a chat with these messages. A field that changes
    the prompt of such a request has the same effect here. A field that such a request may not have is refused here.
    """

    model_config = ConfigDict(extra="allow")

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of POST /detokenize, as in vLLM."""

    tokens: list[int]


class AbortBody(Body):
    """The body of POST /v1/abort_requests."""

    req_ids: list[str] = []
    abort_all: bool = False


_BodyT = TypeVar("_BodyT", bound=Body)


def parse_body(kind: type[_BodyT], raw: bytes) -> _BodyT:
    """Parse the JSON of a request's body and check its fields.

    Raises:
        ApiError: 400; the body is not a JSON object, or a field is wrong. The message names the field and its value.
    """
    gc.disable()  # it would visit the values that were parsed before again and again: 8 s of 10 for 60 MB of lists
    try:
        return check_body(kind, _load_object(raw))
    finally:
        gc.enable()


def _load_object(raw: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise ApiError(400, f"the body is not valid JSON: {_find_json_fault(raw, exc)}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, but it is {quote_short(value)}")
    return value


def check_body(kind: type[_BodyT], value: dict[str, Any]) -> _BodyT:
    """Check the fields of a body that is parsed already.

    Raises:
        ApiError: 400; a field is wrong. The message names the field and its value.
    """
    kind.check_fields(value)
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        # If a field has several types, pydantic reports an error for each of them. The error with the longest path into
        # the value is of the type that the client meant.
        errors = exc.errors(include_url=False)
        param, error = max(((_path_of_fault(value, error), error) for error in errors), key=lambda found: len(found[0]))
        name = name_field(*map(str, param))
        given = "" if error["type"] == "missing" else f", but it is {quote_short(error['input'])}"
        code = "missing_required_parameter" if error["type"] == "missing" else None
        raise ApiError(400, f"{name}: {error['msg']}{given}", param=name, code=code) from None


def _find_json_fault(raw: bytes, error: orjson.JSONDecodeError) -> str:
    """Return the first fault in a body's JSON, with its line and column."""
    try:
        json.loads(raw.decode())
    except UnicodeDecodeError as exc:
        line, column = raw.count(b"\n", 0, exc.start) + 1, exc.start - raw.rfind(b"\n", 0, exc.start)
        return f"it is not UTF-8: line {line} byte {column} (byte {exc.start}) is 0x{raw[exc.start]:02x}"
    except json.JSONDecodeError as exc:
        return str(exc)
    except (ValueError, RecursionError):
        pass
    return str(error)  # such as NaN, which Python accepts


def _path_of_fault(value: Any, error: ErrorDetails) -> list[int | str]:
    """Return the path of names and indexes to a wrong or missing value in the client's body.

    It is pydantic's location without the names of types that pydantic adds for fields with several types.
    """
    path: list[int | str] = []
    for part in error["loc"]:
        with contextlib.suppress(LookupError, TypeError):
            value = value[part]
            path.append(part)
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    return path or [error["loc"][0]]


def quote_short(value: object) -> str:
    """Return a client's value as JSON of at most 60 characters, for a message."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # orjson reads deeper nesting than it writes
        return type(value).__name__
    return _shorten(text)


def name_field(*path: str) -> str:
    """Return the path of a field for a message. Names are escaped and cut, because the client may have chosen them."""
    return ".".join(_shorten(name if name.isprintable() else json.dumps(name)) for name in path)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_text_content(
    name: str, content: object, param: str | None = None, kinds: Sequence[str] = ("text",)
) -> str | list[dict[str, Any]]:
    """Check that the content of a message is a text, or a list of parts that are texts; return the content.

    Args:
        name: the path of the content in the request's body, for the error message.
        content: the value of the message's member ``content``.
        param: the name of the field for the error, or None if the API reports none.
        kinds: the values of a part's ``type`` that mean a text.

    Raises:
        ApiError: 400; the content is something else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{name}: it is {quote_short(content)}; give a text, or a list of text parts", param=param)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if not isinstance(part, dict) or kind not in kinds or not isinstance(part.get("text"), str):
            message = f"{name}.{index}: a part of type {quote_short(kind)}; only text is supported"
            raise ApiError(400, message, param=param)
    return content


def join_texts(parts: Iterable[dict[str, Any]]) -> str:
    """Return the texts of a message's parts as one text."""
    return "".join(part["text"] for part in parts)


def sampling_params(
    body: GenerationBody, *, max_tokens: int, defaults: SamplingDefaults | None = None
) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        body: the client's request body.
        max_tokens: number of tokens that fit into the context after the prompt.
        defaults: values for the fields that the client does not give. The ``completion_token_ids`` of the request count
            towards the default ``max_tokens``.
    """
    defaults = defaults or SamplingDefaults()
    wanted = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        wanted = body.max_completion_tokens
    if wanted is None and defaults.max_tokens is not None:
        wanted = max(1, defaults.max_tokens - len(body.completion_token_ids or []))
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    penalty = body.repetition_penalty
    return SamplingParams(
        max_tokens=max_tokens if wanted is None else min(wanted, max_tokens),
        min_tokens=body.min_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else max(body.top_k, 0),
        repetition_penalty=defaults.repetition_penalty if penalty is None else penalty,
        seed=body.seed,
        stop=tuple(text for text in stop if text),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=body.num_logprobs(),
    )


def build_usage(
    prompt: int,
    completion: int,
    own_cached: int,
    pool_cached: int,
    written: int,
    blocks: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return OpenAI's usage object, with further members for the own cache and the pool.

    Args:
        prompt, completion: number of tokens of the prompt, and of the answer.
        own_cached, pool_cached: number of prompt tokens from the own cache, and from the pool.
        written: number of prompt tokens that were computed and are cached from now on.
        blocks: with sparse attention, the number of blocks that were read, and the number that full attention would
            have read, both summed over steps and layers; None without sparse attention.
    """
    details = {} if blocks is None else {"retrieval_details": {"blocks_read": blocks[0], "blocks_total": blocks[1]}}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": own_cached + pool_cached,
            "own_cached_tokens": own_cached,
            "pool_cached_tokens": pool_cached,
            "cache_write_tokens": written,
        },
        **details,
    }


def now() -> int:
    """Return the current time in seconds since 1970, for the field ``created``."""
    return int(time.time())
