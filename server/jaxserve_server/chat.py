"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve_server.answer import Answer, respond
from jaxserve_server.body import BODY_BYTES, read_body
from jaxserve_server.generation import ChoiceCursor, Delta, Prompt, Work, check_context
from jaxserve_server.logprobs import TokenText, without_end
from jaxserve_server.protocol import ChatBody
from jaxserve_server.sampling import chat_params
from jaxserve_server.state import STATE
from jaxserve_server.tokens import chat_token_ids, tokenizer_of
from jaxserve_server.truncation import most_tokens, room_for_prompt, truncated
from jaxserve_server.workers import off_loop


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.lifecycle.check_admission()
    body = await read_body(request, ChatBody)
    model = state.model_name(body.model)
    with state.lifecycle.admitted() as engine:
        params = chat_params(body, engine.default_sampling_params)
        tokenizer = tokenizer_of(engine, "messages")
        most = most_tokens(engine.max_model_len, body)
        token_ids = await off_loop(request[BODY_BYTES], chat_token_ids, tokenizer, body, most)
        room = room_for_prompt(engine.max_model_len, body.token_limit)
        prompt = Prompt(truncated(token_ids, body, room))
        check_context([prompt], engine.max_model_len, "messages")
        work = Work([prompt], params, body.priority, body.cache_salt, final_only=not body.stream)
        token_text = TokenText(tokenizer, body.skip_special_tokens, body.return_tokens_as_token_ids)
        return await respond(request, engine, work, ChatAnswer(body, model, work, token_text))


class ChatAnswer(Answer):
    """One conversation, `n` choices; a stream begins with one role chunk for each."""

    operation = "chat"
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    body: ChatBody

    def __init__(self, body: ChatBody, model: str, work: Work, token_text: TokenText) -> None:
        super().__init__(body, model, work)
        self._token_text = token_text
        self._prompt = work.prompts[0]
        self._cursors = [ChoiceCursor(token_text, self._prompt, body) for _ in range(body.n)]
        if body.return_token_ids:
            self.unsent = body.n * len(self._prompt.token_ids)  # in the opening

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(self.body.n):
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = super().chunk(choice)
        if self.body.return_token_ids and "role" in choice["delta"]:
            chunk["prompt_token_ids"] = self._prompt.token_ids
        return chunk

    def pieces(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for choice in output.outputs:
            cursor = self._cursors[choice.index]
            if cursor.finished:
                continue
            delta = cursor.advance(choice)
            if delta:
                piece = {
                    "index": choice.index,
                    "delta": {"content": delta.text} if delta.text else {},
                    "logprobs": self._logprobs(choice, delta),
                    "finish_reason": delta.finish_reason,
                }
                if delta.finish_reason is not None:
                    piece["stop_reason"] = delta.stop_reason
                yield piece | self._token_ids(choice, delta)

    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        for choice in outputs[0].outputs:
            delta = self._cursors[choice.index].advance(choice)
            shown = {
                "index": choice.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(choice, delta),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
            yield shown | self._token_ids(choice, delta)

    def rest(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            rest["prompt_logprobs"] = self._token_text.prompt_json(outputs[0].prompt_logprobs or [])
        if self.body.return_token_ids:
            rest["prompt_token_ids"] = self._prompt.token_ids
        return rest

    def _token_ids(self, choice: CompletionOutput, delta: Delta) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": choice.token_ids[delta.first_token : delta.end_token]}

    def _logprobs(self, choice: CompletionOutput, delta: Delta) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        top = self.body.top_logprobs or 0
        positions = choice.logprobs or []
        content = [
            self._token_text.chat_entry(choice.token_ids[position], positions[position], top)
            for position in range(delta.first_token, delta.end_token)
        ]
        # The join of all bytes is the text, so what the text leaves out has none.
        if delta.silent_token is not None and delta.first_token <= delta.silent_token < delta.end_token:
            content[delta.silent_token - delta.first_token]["bytes"] = []
        if delta.cut_chars and content:
            content[-1]["bytes"] = list(without_end(bytes(content[-1]["bytes"]), delta.cut_chars))
        return {"content": content, "refusal": None}
