"""OpenAI's chat and plain completions: encodes the prompts of requests, and begins their responses."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from engine.apis.completion_response import ChatResponse, CompletionResponse, TextResponse
from engine.generation import Choices, Generations, PairInfo
from engine.generation.detokenizer import TokenBytes
from engine.protocol import (
    MAX_ANSWERS,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    check_body,
    check_text_content,
    join_texts,
    now,
    quote_short,
    sampling_params,
)
from engine.scheduling.cache_hints import CacheHint, CacheOptions, find_marks
from engine.scheduling.request import Request, SamplingDefaults
from kvstore_backend.why_miss import count_common

__all__ = [
    "Completions",
    "PairDialect",
]

# Texts with more characters are encoded on another thread, because that takes more than some milliseconds.
_LONG_TEXT = 4096
# A chat template that supports the role developer; others refuse or omit messages with this role.
_DEVELOPER = re.compile("""['"]developer['"]""")
# Maximum number of hints for the cache in a conversation, as in Anthropic's API. Each costs a rendering of its own.
_MAX_MARKS = 4


class PairDialect:
    """FastDeploy's dialect: reads from a request which pair serves it. Tests have subclasses for other engines."""

    registration: Mapping[str, Any] = {}
    """Fields that this dialect adds to the instance's registration at the router."""

    def find_request_id(self, body: GenerationBody) -> str | None:
        """Return the id of the request that the client gave, or None if it gave none."""
        return body.request_id

    def read_pairs(self, body: GenerationBody, request_id: str, num_prompts: int) -> Sequence[PairInfo | None]:
        """Return for each prompt the pair that serves it, or None if this instance answers the prompt alone.

        Args:
            body: the request body.
            request_id: the id of the request.
            num_prompts: number of prompts in the request.

        Raises:
            ApiError: 400; the engine of this dialect would refuse the request.
        """
        return [body.disaggregate_info] * num_prompts


class Completions:
    """Checks requests for completions, and begins their responses.

    Args:
        generations: creates the generations that answer requests.
        tokenizer: a tokenizer of transformers. Chat needs one with a chat template.
        model: the name of the model in responses.
        max_model_len: maximum number of tokens of prompt and answer together.
        vocab_size: size of the vocabulary; token ids in requests must be smaller.
        defaults: default sampling parameters.
        eos_token_ids: the tokens that end an answer.
        dialect: the dialect of requests to a pair, or None for FastDeploy's.
    """

    def __init__(
        self,
        generations: Generations,
        tokenizer: Any,
        model: str,
        max_model_len: int,
        vocab_size: int,
        defaults: SamplingDefaults | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        dialect: PairDialect | None = None,
    ) -> None:
        self._generations = generations
        self.tokenizer = tokenizer
        self.model = model
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._defaults = defaults
        self._eos_token_ids = eos_token_ids
        self._dialect = dialect or PairDialect()
        self._created = now()
        self._token_bytes = TokenBytes(tokenizer)
        # Maximum number of characters of a token, to estimate the number of tokens of a text without encoding it.
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        # Arguments of ``apply_chat_template``, which clients may not give as variables of the template. With them a
        # client could send its own template, which could run for minutes.
        self._rendering = inspect.signature(tokenizer.apply_chat_template).parameters

    def list_models(self) -> dict[str, Any]:
        """Return the response of GET /v1/models."""
        model = {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "fastdeploy-kvstore",
            "max_model_len": self._max_model_len,
        }
        return {"object": "list", "data": [model]}

    def describe_model(self, model_id: str) -> dict[str, Any]:
        """Return the response of GET /v1/models/{id}.

        Raises:
            ApiError: 404; this instance serves another model.
        """
        model: dict[str, Any] = self.list_models()["data"][0]
        if model_id != self.model:
            message = f"this instance serves no model {quote_short(model_id)}; it serves {quote_short(self.model)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    async def begin_chat(self, body: ChatBody) -> CompletionResponse:
        """Check the body of POST /v1/chat/completions and begin the response.

        Raises:
            ApiError: the messages cannot be rendered, or the prompt is too long.
        """
        return ChatResponse(await self.begin_chat_choices(body), body, self.model, self._token_bytes)

    async def begin_chat_choices(self, body: ChatBody) -> Choices:
        """Begin the answers of a chat as ``begin_chat`` does, but return them without a response object."""
        tokens = await self.encode_chat(body)
        hints = [] if body.prompt_token_ids else await self._find_hints(body, tokens)
        return self._begin_choices(body, [tokens], "prompt_token_ids", hints)

    async def begin_completion(self, body: CompletionBody) -> CompletionResponse:
        """Check the body of POST /v1/completions and begin the response.

        Raises:
            ApiError: there is no prompt, there are too many prompts, or a prompt is too long.
        """
        prompts = await self.encode_prompts(body)
        return TextResponse(self._begin_choices(body, prompts, "prompt"), body, self.model, self._token_bytes)

    async def encode_prompts(self, body: CompletionBody) -> list[list[int]]:
        """Return the tokens of each prompt of a plain completion.

        Raises:
            ApiError: there is no prompt, there are too many prompts, or a prompt is too long.
        """
        given: Any = body.prompt_token_ids or body.prompt
        prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(prompts) * body.n > MAX_ANSWERS:
            message = (
                f"prompt: {len(prompts)} prompts with n {body.n}; at most {MAX_ANSWERS} answers per request are allowed"
            )
            raise ApiError(400, message, param="prompt")
        for index, prompt in enumerate(prompts):
            if not prompt:
                name = f"prompt.{index}" if len(prompts) > 1 else "prompt"
                raise ApiError(400, f"{name}: it is missing or empty; give a text or a list of token ids", param=name)
        if not isinstance(prompts[0], str):
            return prompts
        # A plain prompt needs special tokens, such as Llama's first token. Chat templates write special tokens.
        return await self._encode_texts(prompts, "prompt", add_special_tokens=body.add_special_tokens)

    async def tokenize_prompt(self, body: TokenizeBody) -> dict[str, Any]:
        """Return the response of POST /tokenize: the tokens of the prompt of a request with the same fields.

        Raises:
            ApiError: the body has neither a text nor messages, or has both, or the request would be refused.
        """
        if (body.prompt is None) == (body.messages is None):
            given = "has both" if body.messages is not None else "has neither"
            message = f"prompt: give either prompt (a text) or messages; this body {given}"
            raise ApiError(400, message, param="prompt")
        others = body.model_extra or {}
        if body.messages is not None:
            tokens = await self.encode_chat(check_body(ChatBody, {**others, "messages": body.messages}))
        else:
            plain = check_body(CompletionBody, {**others, "prompt": body.prompt})
            tokens = await self._encode_text(body.prompt or "", "prompt", add_special_tokens=plain.add_special_tokens)
        texts = self.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._max_model_len, "token_strs": texts}

    def detokenize_tokens(self, body: DetokenizeBody) -> dict[str, Any]:
        """Return the response of POST /detokenize: the text of the tokens, with special tokens, as in vLLM.

        Raises:
            ApiError: 400; a token id is not in the vocabulary.
        """
        self._check_tokens(body.tokens, "tokens")
        text = self.tokenizer.decode(body.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return {"prompt": text}

    async def _find_hints(self, body: ChatBody, tokens: list[int]) -> list[CacheHint]:
        """Return the hints of messages, and of parts of messages, for how long to cache the prompt up to there.

        ``tokens`` are the tokens of the prompt.
        """
        try:
            marks = list(find_marks(body.messages, (body.prompt_cache_options or CacheOptions()).seconds))
        except ValueError as exc:
            raise ApiError(400, str(exc), param="messages") from None
        if len(marks) > _MAX_MARKS:
            message = (
                f"messages: {len(marks)} messages or parts have a hint for the cache; at most {_MAX_MARKS} may have one"
            )
            raise ApiError(400, message, param="messages")
        hints = []
        for mark in marks:
            *before, last = body.messages[: mark.message + 1]
            shown = last if mark.text is None else {**last, "content": mark.text}
            try:
                text = self._render_chat(body, [*before, shown], lets_assistant_speak=False)
            except ApiError:  # some templates cannot render a part of a conversation; then the hint is ignored
                continue
            shown_tokens = await self._encode_text(text, "messages", add_special_tokens=body.add_special_tokens)
            hints.append(CacheHint(count_common(tokens, shown_tokens), mark.seconds))
        return hints

    def _begin_choices(
        self, body: GenerationBody, prompts: Sequence[list[int]], param: str, hints: Sequence[CacheHint] = ()
    ) -> Choices:
        if body.completion_token_ids and len(prompts) * body.n > 1:
            several = f"n is {body.n}" if body.n > 1 else f"there are {len(prompts)} prompts"
            message = f"completion_token_ids: these tokens are the beginning of one answer, but {several}; give 1"
            raise ApiError(400, message, param="completion_token_ids")
        self._check_tokens(body.completion_token_ids or [], "completion_token_ids")
        self._check_tokens(body.stop_token_ids or [], "stop_token_ids")
        if body.min_tokens and len(self._eos_token_ids.union(body.stop_token_ids or ())) >= self._vocab_size:
            message = "stop_token_ids: every token would end the answer, so min_tokens cannot be reached; give fewer"
            raise ApiError(400, message, param="stop_token_ids")
        request_id = self._dialect.find_request_id(body) or str(uuid.uuid4())
        names = [f"{param}.{index}" for index in range(len(prompts))] if len(prompts) > 1 else [param]
        requests = [
            self._make_request(body, request_id, prompt, name, hints)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        pairs = self._dialect.read_pairs(body, request_id, len(prompts))
        return self._generations.begin_choices(list(zip(requests, pairs, strict=True)), body.n)

    def _make_request(
        self, body: GenerationBody, request_id: str, prompt: list[int], param: str, hints: Sequence[CacheHint]
    ) -> Request:
        """Return the engine's request for one prompt.

        ``param`` is the name of the field with the prompt, for errors. ``hints`` say for how long to cache its
        beginning.

        Raises:
            ApiError: 400; the prompt is too long, or a token id is not in the vocabulary.
        """
        tokens = prompt + (body.completion_token_ids or [])
        if not tokens:
            raise ApiError(400, "the prompt has no tokens; give at least one")
        room = self._max_model_len - len(tokens)
        if room < 1:
            raise self._too_long(str(len(tokens)), "messages" if isinstance(body, ChatBody) else param)
        self._check_tokens(prompt, param)
        params = sampling_params(body, max_tokens=room, defaults=self._defaults)
        if params.min_tokens > params.max_tokens:
            message = f"min_tokens: it is {params.min_tokens}, but the answer has at most {params.max_tokens} tokens"
            raise ApiError(400, message, param="min_tokens")
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(tokens),
            params=params,
            cache_salt=body.cache_salt or "",
            num_begun=len(body.completion_token_ids or []),
            hints=(*hints, *([CacheHint(len(prompt), body.cache_seconds)] if body.cache_seconds else [])),
        )

    def _check_tokens(self, tokens: list[int], param: str) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise ApiError(400, f"{param}: token id {wrong} is not in [0, {self._vocab_size})", param=param)

    async def _encode_text(self, text: str, param: str, *, add_special_tokens: bool = False) -> list[int]:
        [tokens] = await self._encode_texts([text], param, add_special_tokens=add_special_tokens)
        return tokens

    async def _encode_texts(self, texts: Sequence[str], param: str, *, add_special_tokens: bool) -> list[list[int]]:
        for index, text in enumerate(texts):
            at_least = -(-len(text) // self._longest_token)
            if at_least >= self._max_model_len:
                raise self._too_long(f"at least {at_least}", f"{param}.{index}" if len(texts) > 1 else param)

        def encode() -> list[list[int]]:
            return [self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"] for text in texts]

        return await asyncio.to_thread(encode) if sum(map(len, texts)) > _LONG_TEXT else encode()

    def _too_long(self, num_tokens: str, param: str) -> ApiError:
        place = f"{param}: " if "." in param else ""  # say which one, if there are several prompts
        return ApiError(
            400,
            f"{place}the prompt has {num_tokens} tokens; with at least one token for the answer, that exceeds the "
            f"max_model_len of {self._max_model_len}",
            param=param,
            code="context_length_exceeded",
        )

    async def encode_chat(self, body: ChatBody) -> list[int]:
        """Return the tokens of a chat's prompt: the rendered messages, or ``prompt_token_ids`` if the body has them.

        With ``continue_final_message`` the last message is the beginning of the answer. Then its tokens follow the
        tokens of the other messages, as if the model had generated them.

        Raises:
            ApiError: 400; the messages cannot be rendered, or the prompt is too long.
        """
        if body.prompt_token_ids:
            return body.prompt_token_ids
        if (
            body.continue_final_message
            and body.add_generation_prompt
            and "add_generation_prompt" in body.model_fields_set
        ):
            message = "continue_final_message: it is true, and so is add_generation_prompt; give false for one of them"
            raise ApiError(400, message, param="continue_final_message")
        # A template writes at least one token for each message. To render a million messages takes some seconds.
        if len(body.messages) >= self._max_model_len:
            raise self._too_long(f"at least {len(body.messages)}", "messages")
        encode = partial(self._encode_text, param="messages", add_special_tokens=body.add_special_tokens)
        if not body.continue_final_message:
            return await encode(self._render_chat(body, body.messages))
        *before, final = body.messages
        prompt = self._render_chat(body, before, lets_assistant_speak=True) if before else ""
        final = _plain_message(len(before), final)
        if final["role"] != "assistant" or body.messages[-1].get("content") is None or not before:
            message = "continue_final_message: the last of several messages must be the assistant's, with a text"
            raise ApiError(400, message, param="messages")
        tokens = await encode(prompt)
        whole = await encode(prompt + final["content"])
        if whole[: len(tokens)] == tokens:
            return whole
        # If both are encoded together, the end of the prompt and the beginning of the text become one token. But the
        # model generated the text after the tokens of the prompt.
        return tokens + await self._encode_text(final["content"], "messages")

    def _render_chat(
        self, body: ChatBody, messages: list[dict[str, Any]], *, lets_assistant_speak: bool | None = None
    ) -> str:
        """Return the text of messages, rendered with the chat template of the checkpoint.

        ``lets_assistant_speak`` says whether the text ends with the beginning of the assistant's turn. If it is None,
        ``body.add_generation_prompt`` says this.

        Raises:
            ApiError: 400; the messages cannot be rendered.
        """
        messages = [_plain_message(i, message) for i, message in enumerate(messages)]
        template = getattr(self.tokenizer, "chat_template", None)
        if not template:
            raise ApiError(400, "this checkpoint has no chat template; use /v1/completions")
        if not _DEVELOPER.search(str(template)):
            messages = _move_developer_messages(messages)
        variables = body.chat_template_kwargs or {}
        if refused := next((name for name in variables if name in self._rendering), None):
            raise ApiError(
                400,
                f"chat_template_kwargs: {refused} is not a variable of the checkpoint's chat template; "
                "leave the variable out",
                param="chat_template_kwargs",
            )
        # A tool call is a part of the answer's text, as in FastDeploy without a tool parser. If the client allows no
        # call, the template gets no tools.
        tools = body.tools if body.tools and body.tool_choice == "auto" else None
        if lets_assistant_speak is None:
            lets_assistant_speak = body.add_generation_prompt
        render = partial(
            self.tokenizer.apply_chat_template,
            add_generation_prompt=lets_assistant_speak,
            tokenize=False,
            **variables,
        )
        try:
            text: str = render(messages, tools=tools)
            ignores_tools = tools is not None and text == render(messages, tools=None)
        except Exception as exc:
            # A template is a program in the checkpoint, and may raise any exception for messages that it refuses.
            raise ApiError(
                400, f"messages: the checkpoint's chat template refused the messages: {exc}", param="messages"
            ) from None
        if ignores_tools:
            message = "tools: this checkpoint's chat template does not support tools; leave them out"
            raise ApiError(400, message, param="tools")
        return text


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates of text models expect it: the content is one text, the arguments of calls objects.

    As in vLLM, a message without content has an empty text, also if it has calls.

    Raises:
        ApiError: 400; the message has no role, or its content is not text. The error names the ``index``.
    """
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"messages.{index}.role: it is missing; give user, assistant or system", param="messages")
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": _parse_arguments(calls)}
    elif "tool_calls" in message:  # some templates check only whether the message has this member
        message = {name: value for name, value in message.items() if name != "tool_calls"}
    if message.get("content") is None:
        return {**message, "content": ""}
    content = check_text_content(f"messages.{index}.content", message["content"], "messages")
    return message if isinstance(content, str) else {**message, "content": join_texts(content)}


def _move_developer_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with those of developers in the system's message, for templates without the role developer.

    As in vLLM, all system messages then become one at the beginning, because some templates refuse them elsewhere.
    """
    if all(message["role"] != "developer" for message in messages):
        return messages
    texts = [message.get("content") for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _parse_arguments(calls: Any) -> Any:
    """Return the calls of a message with their arguments as objects; in OpenAI's API they are the JSON of objects.

    As in vLLM, arguments that are something else become an empty object, because the client cannot correct what the
    model wrote earlier in the conversation.
    """
    if not isinstance(calls, list):
        return calls
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError, RecursionError):
                    orjson.loads(arguments)  # it refuses NaN and incomplete surrogates, but rounds long integers
                    arguments = json.loads(arguments)
            call = {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}
        parsed.append(call)
    return parsed
