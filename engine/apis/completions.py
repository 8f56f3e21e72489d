"""OpenAI's chat and plain completions on top of generations: prompts in, JSON objects and event streams out."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import inspect
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from engine.generation import Choices, Generations, PairInfo, Piece
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
    error_body,
    now,
    quote_short,
    sampling_params,
)
from engine.scheduling.cache_hints import CacheHint, count_common, find_marks
from engine.scheduling.request import Request, SamplingDefaults, TokenLogprobs

__all__ = [
    "ENGINE_FAILED",
    "REQUEST_ABORTED",
    "BegunResponse",
    "CompletionResponse",
    "Completions",
    "PairDialect",
    "name_answer",
]

# Number of characters that take some milliseconds to encode. The event loop serves all clients, so it encodes no more
# at a time.
_LONG_TEXT = 4096
# The same limit as Anthropic's API: each hint is rendered and encoded separately.
_MAX_MARKS = 4
ENGINE_FAILED = "the engine failed while computing this request; its log says why"
REQUEST_ABORTED = "the request was aborted before its answer ended"


class PairDialect:
    """Reads from requests which role in a pair this instance has, in FastDeploy's form; tests have other engines'."""

    registration: Mapping[str, Any] = {}
    """The fields about its dialect that the instance registers with."""

    def find_request_id(self, body: GenerationBody) -> str | None:
        """Return the id that the client gave the request."""
        return body.request_id

    def read_pairs(self, body: GenerationBody, request_id: str, num_prompts: int) -> Sequence[PairInfo | None]:
        """Return this instance's role for each of the request's prompts; None: it answers the prompt alone.

        Raises:
            ApiError: 400, the engine of this dialect would refuse the request.
        """
        return [body.disaggregate_info] * num_prompts


class Completions:
    """Begins the responses of one model.

    Args:
        generations: runs the requests.
        tokenizer: a transformers tokenizer, with a chat template if chat is served.
        model: name in the responses.
        max_model_len: maximum number of tokens of prompt and answer together.
        vocab_size: token ids that a client sends must be below it.
        defaults: sampling parameters for clients that send none.
        eos_token_ids: the tokens that end an answer.
        dialect: the format of requests to a prefill/decode pair; None: FastDeploy's.
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
        # In characters. A vocabulary piece has one character for each character of its text, or one for each byte.
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        # Clients may not choose how templates are rendered: a template of their own could compute for minutes.
        self._rendering = inspect.signature(tokenizer.apply_chat_template).parameters

    def list_models(self) -> dict[str, Any]:
        """GET /v1/models."""
        model = {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "fastdeploy-kvstore",
            "max_model_len": self._max_model_len,
        }
        return {"object": "list", "data": [model]}

    def describe_model(self, model_id: str) -> dict[str, Any]:
        """GET /v1/models/{id}.

        Raises:
            ApiError: 404, this instance serves another model.
        """
        model: dict[str, Any] = self.list_models()["data"][0]
        if model_id != self.model:
            message = f"this instance serves no model {quote_short(model_id)}; it serves {quote_short(self.model)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    async def begin_chat(self, body: ChatBody) -> CompletionResponse:
        """Check POST /v1/chat/completions and prepare its response.

        Raises:
            ApiError: the messages cannot be rendered, or do not fit.
        """
        return ChatResponse(await self.begin_chat_choices(body), body, self.model, self._token_bytes)

    async def begin_chat_choices(self, body: ChatBody) -> Choices:
        """Do the same as ``begin_chat``, but return the choices without a response format."""
        tokens = await self.encode_chat(body)
        hints = [] if body.prompt_token_ids else await self._find_hints(body, tokens)
        return self._begin_choices(body, [tokens], "prompt_token_ids", hints)

    async def begin_completion(self, body: CompletionBody) -> CompletionResponse:
        """Check POST /v1/completions and prepare its response.

        Raises:
            ApiError: there is no prompt, there are too many for one request, or one does not fit.
        """
        prompts = await self.encode_prompts(body)
        return TextResponse(self._begin_choices(body, prompts, "prompt"), body, self.model, self._token_bytes)

    async def encode_prompts(self, body: CompletionBody) -> list[list[int]]:
        """Return the tokens of each plain prompt.

        Raises:
            ApiError: there is no prompt, there are too many for one request, or one does not fit.
        """
        given: Any = body.prompt_token_ids or body.prompt
        prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        if len(prompts) * body.n > MAX_ANSWERS:
            message = f"prompt: {len(prompts)} prompts with n {body.n}; one request may have {MAX_ANSWERS} answers"
            raise ApiError(400, message, param="prompt")
        for index, prompt in enumerate(prompts):
            if not prompt:
                name = f"prompt.{index}" if len(prompts) > 1 else "prompt"
                raise ApiError(400, f"{name}: it is missing or empty; give a text or a list of token ids", param=name)
        if not isinstance(prompts[0], str):
            return prompts
        # Special tokens, such as Llama's first token. A chat template writes them itself.
        return await self._encode_texts(prompts, "prompt", add_special_tokens=body.add_special_tokens)

    async def tokenize_prompt(self, body: TokenizeBody) -> dict[str, Any]:
        """Answer POST /tokenize: the prompt tokens of a request with these fields.

        Raises:
            ApiError: it has neither a text nor messages, or both, or a field for which the request would be refused.
        """
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt, a text, or messages", param="prompt")
        others = body.model_extra or {}
        if body.messages is not None:
            tokens = await self.encode_chat(check_body(ChatBody, {**others, "messages": body.messages}))
        else:
            plain = check_body(CompletionBody, {**others, "prompt": body.prompt})
            tokens = await self._encode_text(body.prompt or "", "prompt", add_special_tokens=plain.add_special_tokens)
        texts = self.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._max_model_len, "token_strs": texts}

    def detokenize_tokens(self, body: DetokenizeBody) -> dict[str, Any]:
        """Answer POST /detokenize: the text that a response has for these tokens, without special tokens.

        Raises:
            ApiError: the model does not have one of the tokens.
        """
        self._check_tokens(body.tokens, "tokens")
        text = self.tokenizer.decode(body.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return {"prompt": text}

    async def _find_hints(self, body: ChatBody, tokens: list[int]) -> list[CacheHint]:
        """Return the hints at messages and at their parts, in tokens of the whole prompt."""
        try:
            marks = list(find_marks(body.messages))
        except ValueError as exc:
            raise ApiError(400, str(exc), param="messages") from None
        if len(marks) > _MAX_MARKS:
            message = f"messages: {len(marks)} of their parts have cache_control; {_MAX_MARKS} may"
            raise ApiError(400, message, param="messages")
        hints = []
        for mark in marks:
            *before, last = body.messages[: mark.message + 1]
            shown = last if mark.text is None else {**last, "content": mark.text}
            try:
                text = self._render_chat(body, [*before, shown], lets_assistant_speak=False)
            # some templates cannot render a conversation without a user message, and a hint is optional
            except ApiError:
                continue
            shown_tokens = await self._encode_text(text, "messages", add_special_tokens=body.add_special_tokens)
            hints.append(CacheHint(count_common(tokens, shown_tokens), mark.seconds))
        return hints

    def _begin_choices(
        self, body: GenerationBody, prompts: Sequence[list[int]], param: str, hints: Sequence[CacheHint] = ()
    ) -> Choices:
        if body.completion_token_ids and len(prompts) * body.n > 1:
            several = f"n is {body.n}" if body.n > 1 else f"there are {len(prompts)} prompts"
            message = f"completion_token_ids: they are one answer's beginning, but {several}; give 1"
            raise ApiError(400, message, param="completion_token_ids")
        self._check_tokens(body.completion_token_ids or [], "completion_token_ids")
        self._check_tokens(body.stop_token_ids or [], "stop_token_ids")
        if body.min_tokens and len(self._eos_token_ids.union(body.stop_token_ids or ())) >= self._vocab_size:
            message = "stop_token_ids: every token ends the answer, and none that does may come before min_tokens"
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
        """Build the engine's request for one of the prompts.

        Raises:
            ApiError: 400, the prompt does not fit, or has a token that the model does not have.
        """
        tokens = prompt + (body.completion_token_ids or [])
        if not tokens:
            raise ApiError(400, "the prompt has no tokens")
        room = self._max_model_len - len(tokens)
        if room < 1:
            raise self._too_long(str(len(tokens)), "messages" if isinstance(body, ChatBody) else param)
        self._check_tokens(prompt, param)
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(tokens),
            params=sampling_params(body, max_tokens=room, defaults=self._defaults),
            cache_salt=body.cache_salt or "",
            num_begun=len(body.completion_token_ids or []),
            hints=(*hints, *([CacheHint(len(prompt), body.cache_control.seconds)] if body.cache_control else [])),
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
        place = f"{param}: " if "." in param else ""  # one of several prompts
        return ApiError(
            400,
            f"{place}the prompt has {num_tokens} tokens; with at least one for the answer that is more than the "
            f"max_model_len of {self._max_model_len}",
            param=param,
            code="context_length_exceeded",
        )

    async def encode_chat(self, body: ChatBody) -> list[int]:
        """Render the messages and return their tokens.

        With ``continue_final_message`` the last message is the beginning of the answer. Its text is then encoded
        separately and its tokens follow those of the other messages, as if the model had generated them. If the request
        has ``prompt_token_ids``, return these.
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
        encode = partial(self._encode_text, param="messages", add_special_tokens=body.add_special_tokens)
        if not body.continue_final_message:
            return await encode(self._render_chat(body, body.messages))
        *before, final = body.messages
        prompt = self._render_chat(body, before, lets_assistant_speak=True) if before else ""
        final = _plain_message(len(before), final)
        if final["role"] != "assistant" or not isinstance(final.get("content"), str) or not before:
            message = "continue_final_message: the last of several messages must be the assistant's, with a text"
            raise ApiError(400, message, param="messages")
        tokens = await encode(prompt)
        whole = await encode(prompt + final["content"])
        if whole[: len(tokens)] == tokens:
            return whole
        # Encoded together, this text and the end of the prompt could merge into another token.
        return tokens + await self._encode_text(final["content"], "messages")

    def _render_chat(
        self, body: ChatBody, messages: list[dict[str, Any]], *, lets_assistant_speak: bool | None = None
    ) -> str:
        """Render the messages with the checkpoint's template; the assistant speaks next, unless ``body`` says no."""
        messages = [_plain_message(i, message) for i, message in enumerate(messages)]
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "this checkpoint has no chat template; use /v1/completions")
        variables = body.chat_template_kwargs or {}
        if refused := next((name for name in variables if name in self._rendering), None):
            raise ApiError(
                400,
                f"chat_template_kwargs: {refused} is no variable of the checkpoint's chat template; leave it out",
                param="chat_template_kwargs",
            )
        # The model decides whether its answer has a tool call; a call is text, as in FastDeploy without a tool parser.
        # If no call is allowed, the model gets no tools.
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
            is_ignorant_of_tools = tools is not None and text == render(messages, tools=None)
        except Exception as exc:
            # Templates are programs in the checkpoint. Only the client can correct messages that a template refuses.
            raise ApiError(400, f"messages: the chat template refused them: {exc}", param="messages") from None
        if is_ignorant_of_tools:
            message = "tools: this checkpoint's chat template does not tell the model of tools; leave them out"
            raise ApiError(400, message, param="tools")
        return text


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its content as one text: templates of text models do not support content parts."""
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"messages.{index}.role: it is missing; give user, assistant or system", param="messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise ApiError(400, f"messages.{index}.content: it is {quote_short(content)}; give a text", param="messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(
                400,
                f"messages.{index}.content: a part of type {quote_short(kind)}; only text is supported",
                param="messages",
            )
    return {**message, "content": "".join(part["text"] for part in content)}


class BegunResponse:
    """A response in any API's format, on top of the generations that answer it.

    Args:
        choices: the answers; no piece of them has been read yet.
        is_stream: whether the client requested a stream.
    """

    def __init__(self, choices: Choices, *, is_stream: bool) -> None:
        self._choices = choices
        self.is_stream = is_stream
        """Whether the client requested a stream."""

    @property
    def request(self) -> Request:
        """The engine's request."""
        return self._choices.request


class CompletionResponse(BegunResponse):
    """A response in OpenAI's format: collected into one object, or as a stream of events."""

    prefix: str
    object_whole: str
    object_chunk: str

    def __init__(self, choices: Choices, body: GenerationBody, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(choices, is_stream=body.stream)
        self._body = body
        self._token_bytes = token_bytes
        self._head = {
            "id": name_answer(self.prefix, choices.request.request_id),
            "created": now(),
            "model": model,
        }

    async def collect_whole(self) -> dict[str, Any]:
        """Collect the whole response.

        Raises:
            ApiError: 500, the engine failed.
        """
        by_choice: list[list[Piece]] = [[] for _ in range(len(self._choices))]
        async with contextlib.aclosing(self._choices.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.finish_reason == "error":
                    raise ApiError(500, ENGINE_FAILED)
                by_choice[index].append(piece)
        choices = [
            self._describe_choice(
                index, pieces, self._token_ids(index, pieces, with_prompt=True), is_whole=True, first=True
            )
            for index, pieces in enumerate(by_choice)
        ]
        whole = {**self._head, "object": self.object_whole, "choices": choices, "usage": self._choices.usage()}
        return whole | self._choices.describe_transfer()

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events, the last one ``[DONE]``."""
        options = self._body.stream_options
        pending: dict[int, list[Piece]] = {}
        async with contextlib.aclosing(self._choices.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.finish_reason == "error":
                    yield _encode_event(error_body(500, ENGINE_FAILED))
                    break
                first = index not in pending
                untold = pending.setdefault(index, [])
                untold.append(piece)
                if not (piece.text or piece.finish_reason or piece.logprobs or first):
                    continue  # the token has not completed a character yet
                ids = self._token_ids(index, untold, with_prompt=first)
                # a client that continues these ids on another instance gets this prompt's usage only here
                if first and ids:
                    ids["prompt_cache"] = self._choices.usage()["prompt_tokens_details"]
                choice = self._describe_choice(index, [piece], ids, is_whole=False, first=first)
                untold.clear()
                chunk: dict[str, Any] = {**self._head, "object": self.object_chunk, "choices": [choice]}
                if options and options.continuous_usage_stats:
                    chunk["usage"] = self._choices.usage()
                elif options and options.include_usage:
                    chunk["usage"] = None
                yield _encode_event(chunk)
        if options and options.include_usage:
            usage = self._choices.usage()
            yield _encode_event({**self._head, "object": self.object_chunk, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _describe_choice(
        self, index: int, pieces: list[Piece], ids: dict[str, Any], *, is_whole: bool, first: bool
    ) -> dict[str, Any]:
        """Describe these pieces of one choice; ``first``: nothing of the choice was sent before."""
        text = "".join(piece.text for piece in pieces)
        return {
            **self._place_text(text, ids, is_whole=is_whole, first=first),
            "logprobs": self._describe_logprobs(index, pieces),
            "index": index,
            "finish_reason": pieces[-1].finish_reason,
        }

    def _place_text(self, text: str, ids: dict[str, Any], *, is_whole: bool, first: bool) -> dict[str, Any]:
        """Return the members that hold a choice's text and the ids of its tokens."""
        raise NotImplementedError

    def _describe_logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        """Return the log probabilities of these pieces of one choice, if the client requested them."""
        raise NotImplementedError

    def _token_ids(self, index: int, pieces: list[Piece], *, with_prompt: bool) -> dict[str, Any]:
        """Return the fields of ``return_token_ids``: the ids of one choice's pieces, and once those of its prompt."""
        if not self._body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self._choices.prompt_of(index))} if with_prompt else {}
        completion = [piece.token_id for piece in pieces if piece.token_id is not None]
        return prompt | {"completion_token_ids": completion}

    def _token_text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


class ChatResponse(CompletionResponse):
    """Response of /v1/chat/completions."""

    prefix = "chatcmpl-"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def _place_text(self, text: str, ids: dict[str, Any], *, is_whole: bool, first: bool) -> dict[str, Any]:
        if is_whole:  # OpenAI's schema requires a refusal, even if it is null
            return {"message": {"role": "assistant", "content": text, "refusal": None, **ids}}
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text, **ids}}

    def _describe_logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        content = [
            {
                **self._describe_token(piece.token_id, piece.logprobs.chosen),
                "top_logprobs": [self._describe_token(token, value) for token, value in piece.logprobs.top],
            }
            for piece in pieces
            if piece.logprobs is not None and piece.token_id is not None
        ]
        return {"content": content, "refusal": None} if self._body.num_logprobs() is not None else None

    def _describe_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._token_bytes(token_id)),
        }


class TextResponse(CompletionResponse):
    """Response of /v1/completions."""

    prefix = "cmpl-"
    object_whole = "text_completion"
    object_chunk = "text_completion"

    def _place_text(self, text: str, ids: dict[str, Any], *, is_whole: bool, first: bool) -> dict[str, Any]:
        return {"text": text, **ids}

    def __init__(self, choices: Choices, body: GenerationBody, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(choices, body, model, token_bytes)
        self._places: dict[int, _Place] = {}
        """For each choice, the offset of its next token in the text."""

    def _describe_logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._body.num_logprobs() is None:
            return None
        choices: list[tuple[int, TokenLogprobs]] = [
            (piece.token_id, piece.logprobs)
            for piece in pieces
            if piece.token_id is not None and piece.logprobs is not None
        ]
        # The chosen token is always among them, even if it is not one of the likeliest tokens.
        tops = [dict([*logprobs.top, (token, logprobs.chosen)]) for token, logprobs in choices]
        return {
            "tokens": [self._name_token(token) for token, _ in choices],
            "token_logprobs": [logprobs.chosen for _, logprobs in choices],
            "top_logprobs": [{self._name_token(token): value for token, value in top.items()} for top in tops],
            "text_offset": [self._place_token(index, token) for token, _ in choices],
        }

    def _name_token(self, token_id: int) -> str:
        """Return a token's text; for a part of a character, return its bytes as OpenAI writes them."""
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _place_token(self, index: int, token_id: int) -> int:
        """Return the offset of a choice's next token, ``token_id``, in characters of its text."""
        place = self._places.setdefault(index, _Place())
        before = place.characters
        if not self._token_bytes.is_special(token_id):
            place.characters += len(place.decoder.decode(self._token_bytes(token_id)))
        return before


class _Place:
    """An offset in a text that arrives as bytes in pieces."""

    def __init__(self) -> None:
        self.characters = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


def name_answer(prefix: str, request_id: str) -> str:
    """Return the id of an answer. The request's id may already have the prefix, as FastDeploy's ids do."""
    return request_id if request_id.startswith(prefix) else prefix + request_id


def _encode_event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
