"""OpenAI's request bodies, checked, and the shape of its responses and errors, and of Anthropic's errors.

Unknown fields are accepted and ignored: clients send many that are harmless without support. Fields that would change
the answer and that this engine cannot support are refused, unless their value changes nothing. ``null`` counts as a
missing field. An instance serves one model and does not check ``model`` (nor does FastDeploy's).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.scheduling.cache_hints import CacheControl
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
    "error_body",
    "parse_body",
    "quote_short",
    "sampling_params",
]


MAX_CHOICES = 128  # OpenAI's limit
MAX_ANSWERS = 1024
"""For all prompts of one request: vLLM takes this many prompts, and our router counts up to it."""
MAX_STOPS = 16  # vLLM and OpenAI accept four
# An id is logged and returned in a header. A router accepts 256 characters, and appends a number to retries.
_MAX_ID_CHARACTERS = 300

Unsupported: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields, each with the values that change nothing, and how the client can avoid other values."""

_NO_FORM = "this engine holds answers to no form; ask for the form in the prompt, and check the answer"
_OWN_LOGPROBS = "this engine tells the model's own probabilities; leave it out"
_TEMPLATE_VARIABLE = "it is a variable of some chat templates; give it in chat_template_kwargs"
# Fields that would change the answer in a way that this engine does not support: the values that change nothing, the
# missing feature, and a remedy. ``GenerationBody`` has more such fields; their types say which values are valid.
_UNSUPPORTED: Unsupported = {
    "allowed_token_ids": (([],), "this engine chooses among all tokens; leave it out"),
    "bad_words": (([],), "this engine forbids no words; leave it out"),
    "bad_words_token_ids": (([],), "this engine forbids no words; leave it out"),
    "custom_logit_processor": ((), "this engine takes no processors of logits; leave it out"),
    "custom_params": (({},), "this engine takes no processors of logits; leave it out"),
    "extra_key": ((), "this engine keeps caches apart by cache_salt; give that"),
    **dict.fromkeys(
        (
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag", "structured_outputs"),
            *("json_schema", "regex", "ebnf"),
        ),
        ((), _NO_FORM),
    ),
    "guided_json_object": ((False,), "this engine holds answers to no form; ask for JSON in the prompt, and check it"),
    "include_logprobs_decode_token": ((True,), "this engine tells tokens as texts; give true"),
    "include_stop_str_in_output": ((False,), "this engine leaves the stop string out; give false"),
    "length_penalty": ((1,), "this engine does not search by beams; leave it out"),
    "logits_processors": (([],), "this engine takes no processors of logits; leave it out"),
    "logits_processors_args": (({},), "this engine has no processors of logits; leave it out"),
    "logprob_token_ids": (([],), "this engine tells the likeliest tokens; give logprobs alone"),
    "lora_path": ((), "this engine has no adapters; leave it out"),
    "no_stop_trim": ((False,), "this engine leaves the stop string out; give false"),
    "prompt_embeds": (([],), "this engine takes texts and token ids; give one of them"),
    "prompt_logprobs": ((False,), "this engine tells probabilities of the answer only; leave it out"),
    "reasoning_max_tokens": ((), "this engine does not tell thinking from answering; give max_tokens"),
    "repetition_detection": ((), "this engine does not look for repetitions; give repetition_penalty"),
    "response_max_tokens": ((), "this engine does not tell thinking from answering; give max_tokens"),
    "return_tokens_as_token_ids": ((False,), "this engine tells tokens as texts; give return_token_ids for their ids"),
    "sampling_logprobs_mode": ((), _OWN_LOGPROBS),
    "session_params": ((), "this engine keeps no sessions; send the whole prompt"),
    "skip_special_tokens": ((True,), "this engine leaves special tokens out; give true"),
    "spaces_between_special_tokens": ((True,), "this engine leaves special tokens out; give true"),
    "stop_regex": (([],), "this engine searches for texts; give stop"),
    "temp_scaled_logprobs": ((False,), _OWN_LOGPROBS),
    "thinking_token_budget": ((-1,), "this engine does not tell thinking from answering; give max_tokens"),
    "top_p_normalized_logprobs": ((False,), _OWN_LOGPROBS),
    "truncate_prompt_tokens": ((), "this engine does not shorten prompts; send what fits"),
    "use_beam_search": ((False,), "this engine does not search by beams; give false"),
    "vllm_xargs": (({},), "this engine has no extensions; leave it out"),
    "watermark": (({}, {"enabled": False}), "this engine marks no answers; leave it out"),
    "watermarking": ((False,), "this engine marks no answers; leave it out"),
}
_UNSUPPORTED_IN_CHAT: Unsupported = {
    "audio": ((), "this engine answers in text only; leave it out"),
    "chat_template": ((), "this engine renders messages by the checkpoint's own template; leave it out"),
    "disable_chat_template": ((False,), "this engine renders messages by the template; use /v1/completions for a text"),
    "documents": (([],), "this engine gives templates no documents; put them into the messages"),
    "echo": ((False,), "this engine does not repeat the prompt; give false"),
    "enable_thinking": ((), "it is a variable of chat templates; give it in chat_template_kwargs"),
    "function_call": (("none", "auto"), 'this engine cannot force a call; give "auto" or "none"'),
    "functions": (([],), "this engine knows no functions; give tools, of which the chat template tells the model"),
    "include_reasoning": ((True,), "this engine does not tell thinking from answering; give true"),
    "input_ids": (([],), "this engine takes them as prompt_token_ids; give that"),
    "modalities": ((["text"],), 'this engine answers in text only; give ["text"]'),
    "moderation": ((), "this engine moderates nothing; leave it out"),
    "prediction": ((), "this engine does not compare answers with a prediction; leave it out"),
    "reasoning_effort": ((), _TEMPLATE_VARIABLE),
    "task": ((), "this engine knows no tasks; put it into the messages"),
    "thinking": (({"type": "disabled"},), _TEMPLATE_VARIABLE),
    "tool_choice": (("none", "auto"), 'this engine cannot force a call; give "auto" or "none"'),
    "verbosity": (("medium",), "this engine does not steer how much a model says; ask for it in the messages"),
    "web_search_options": ((), "this engine searches nothing; leave it out"),
}


class ApiError(Exception):
    """A request that cannot be answered: HTTP ``status`` and one sentence, in OpenAI's error shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or ("invalid_value" if status == 400 and param else None)  # as in FastDeploy

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the same error for an API with other field names; ``names`` maps our names to those."""
        name, dot, rest = (self.param or "").partition(".")
        if name not in names:
            return self
        message = str(self)
        if message.startswith(name):
            message = names[name] + message[len(name) :]
        return ApiError(self.status, message, param=f"{names[name]}{dot}{rest}", code=self.code)

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return error_body(self.status, str(self), param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object for an HTTP status, with the types that FastDeploy has."""
    kind = "invalid_request_error" if 400 <= status < 500 else "internal_error"
    kind = "timeout_error" if status == 408 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_ANTHROPIC_KINDS = {404: "not_found_error", 413: "request_too_large"}


def anthropic_error_body(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object for an HTTP status."""
    kind = "invalid_request_error" if 400 <= status < 500 else "api_error"
    return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, kind), "message": message}}


class Body(BaseModel):
    """The body of a request; fields that it does not define are ignored."""

    model_config = ConfigDict(extra="ignore", strict=False)

    unsupported: ClassVar[Unsupported] = {}
    """Fields that are refused, unless their value changes nothing."""

    @classmethod
    def check_fields(cls, fields: dict[str, Any]) -> None:
        """Raise ``ApiError`` if a field requests an answer that this engine would not give."""
        for name, value in fields.items():
            harmless, explanation = cls.unsupported.get(name, ((value,), ""))
            if value is not None and value not in harmless:
                raise ApiError(400, f"{name}: it is {quote_short(value)}, but {explanation}", param=name)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, fields: Any) -> Any:
        """Drop fields that are null: OpenAI's schema lets clients write them instead of leaving them out."""
        return {name: v for name, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


def _check_printable(request_id: str) -> str:
    """Check that the id is printable, because it is logged."""
    if not request_id.isprintable():
        raise PydanticCustomError("not_printable", "Input should be printable characters")
    return request_id


RequestId: TypeAlias = Annotated[str, Field(max_length=_MAX_ID_CHARACTERS), AfterValidator(_check_printable)]


class StreamOptions(Body):
    """Options for usage in a stream: at its end, or with each event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class DisaggregateInfo(Body):
    """The prefill/decode pair that the router chose; only the fields that this engine needs (FastDeploy's contract)."""

    prefill_ip: str | None = None
    decode_ip: str | None = None
    decode_connector_port: int | None = Field(default=None, ge=1, le=65535)


class ResponseFormat(Body):
    """The format of the answer: only plain text."""

    type: Literal["text"] = "text"


class GenerationBody(Body):
    """Fields that chat and plain completions share."""

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
    """Tokens generated before a preemption by another instance; appended to the prompt (FastDeploy's contract)."""
    return_token_ids: bool = False
    cache_salt: str | None = None
    cache_control: CacheControl | None = None
    """How long to cache the prompt's blocks; messages and their parts may also have it."""
    request_id: RequestId | None = None
    disaggregate_info: DisaggregateInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """vLLM's dialect of pairs; the fields below are SGLang's."""
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    rid: Any = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str]) -> str | list[str]:
        """Limit the number of stop strings: the text of each token is searched for each of them."""
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise PydanticCustomError("too_long", f"Input should be at most {MAX_STOPS} strings")
        return stop

    @field_validator("stream_options")
    @classmethod
    def _only_of_streams(cls, options: StreamOptions, info: ValidationInfo) -> StreamOptions:
        """Refuse stream options without a stream: a client that sends them expects one."""
        if options.model_fields_set and not info.data.get("stream"):
            raise PydanticCustomError("no_stream", "Stream options can only be defined when `stream=True`")
        return options

    def num_logprobs(self) -> int | None:
        """Return how many alternatives to report for each token, or None for none."""
        return None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[Unsupported] = {**_UNSUPPORTED, **_UNSUPPORTED_IN_CHAT}

    messages: list[dict[str, Any]] = Field(min_length=1)
    prompt_token_ids: list[int] | None = None
    """The prompt's tokens, instead of the messages."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = False
    """Add special tokens in addition to those that the template writes."""

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, count: int, info: ValidationInfo) -> int:
        """Refuse alternatives without ``logprobs``: a client that requests them expects their probabilities."""
        if count and not info.data.get("logprobs"):
            raise PydanticCustomError("no_logprobs", "Input should come with logprobs: true")
        return count

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions, for one prompt or several."""

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    prompt_token_ids: list[int] | list[list[int]] | None = None
    """The prompts' tokens, instead of ``prompt`` (FastDeploy's contract)."""
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = True
    """Add special tokens to prompts that are texts."""

    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeBody(Body):
    """POST /tokenize: a text, or messages to be rendered first (vLLM's form).

    Its other fields are those of the completion or chat with this prompt: fields that change the prompt there also
    change it here, and fields that are refused there are also refused here.
    """

    model_config = ConfigDict(extra="allow")

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize (vLLM's form)."""

    tokens: list[int]


class AbortBody(Body):
    """POST /v1/abort_requests."""

    req_ids: list[str] = []
    abort_all: bool = False


_BodyT = TypeVar("_BodyT", bound=Body)


def parse_body(kind: type[_BodyT], raw: bytes) -> _BodyT:
    """Parse and check a body.

    Raises:
        ApiError: 400 with one sentence that names the field, its value and a valid value.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise ApiError(400, f"the body is not valid JSON: {_find_json_fault(raw, exc)}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, but it is {quote_short(value)}")
    return check_body(kind, value)


def check_body(kind: type[_BodyT], value: dict[str, Any]) -> _BodyT:
    """Check the fields of a body.

    Raises:
        ApiError: as in ``parse_body``.
    """
    kind.check_fields(value)
    try:
        return kind.model_validate(value)
    except ValidationError as exc:
        # For a union, every member reports an error; the member that got furthest into the value was meant.
        errors = exc.errors(include_url=False)
        param, error = max(
            ((_path_of_fault(value, error["loc"]), error) for error in errors), key=lambda found: len(found[0])
        )
        name = ".".join(text if text.isprintable() else json.dumps(text) for text in map(str, param))
        given = "" if error["type"] == "missing" else f", but it is {quote_short(error['input'])}"
        code = "missing_required_parameter" if error["type"] == "missing" else None
        raise ApiError(400, f"{name}: {error['msg']}{given}", param=name, code=code) from None


def _find_json_fault(raw: bytes, error: orjson.JSONDecodeError) -> str:
    """Return the first fault of a body and its position; orjson gives positions in bytes."""
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


def _path_of_fault(value: Any, location: tuple[int | str, ...]) -> list[int | str]:
    """Return the path to a fault in the client's body: pydantic's location also names the members of unions."""
    path: list[int | str] = []
    for part in location:
        with contextlib.suppress(LookupError, TypeError):
            value = value[part]
            path.append(part)
    return path or [location[0]]


def quote_short(value: object) -> str:
    """Return a value that a client sent, shortened to fit in a sentence."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # orjson reads deeper nesting than it writes
        return type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def sampling_params(
    body: GenerationBody, *, max_tokens: int, defaults: SamplingDefaults | None = None
) -> SamplingParams:
    """Build the engine's sampling parameters.

    Args:
        body: the client's request body.
        max_tokens: the limit that the context leaves.
        defaults: used where the client gives no value; tokens generated before a preemption count towards its limit.
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
        # Without a client's seed every request draws its own.
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        stop=tuple(text for text in stop if text),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logprobs=body.num_logprobs(),
    )


def build_usage(
    prompt: int, completion: int, own_cached: int, pool_cached: int, blocks: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Build OpenAI's usage object, which also has the caches behind ``cached_tokens``; all in tokens.

    Args:
        prompt, completion: tokens of the prompt and of the answer.
        own_cached, pool_cached: prompt tokens from the own cache and from the pool.
        blocks: with sparse attention, the blocks read and the blocks in total, summed over steps and layers.
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
        },
        **details,
    }


def now() -> int:
    """Return seconds since the epoch, for ``created``."""
    return int(time.time())
