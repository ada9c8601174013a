"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve_server.answer import Answer, respond
from jaxserve_server.body import BODY_BYTES, read_body
from jaxserve_server.generation import ChoiceCursor, Delta, Prompt, Work, check_context, shows_tokens
from jaxserve_server.logprobs import CompletionLogprobs, TextOffsets, TokenText
from jaxserve_server.protocol import CompletionBody
from jaxserve_server.sampling import completion_params
from jaxserve_server.state import STATE
from jaxserve_server.tokens import check_vocabulary, tokenizer_of
from jaxserve_server.truncation import most_tokens, room_for_prompt, truncated
from jaxserve_server.workers import off_loop

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncLLMEngine


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.lifecycle.check_admission()
    body = await read_body(request, CompletionBody)
    model = state.model_name(body.model)
    with state.lifecycle.admitted() as engine:
        params = completion_params(body, engine.default_sampling_params)
        prompts = await off_loop(request[BODY_BYTES], _prompts, engine, body)
        if engine.tokenizer is None:
            params = params.replace(detokenize=False)
        check_context(prompts, engine.max_model_len, "prompt", room=min(1, body.max_tokens))
        work = Work(prompts, params, body.priority, body.cache_salt, final_only=not body.stream)
        token_text = TokenText(engine.tokenizer, body.skip_special_tokens, body.return_tokens_as_token_ids)
        return await respond(request, engine, work, CompletionAnswer(body, model, work, token_text))


def _prompts(engine: AsyncLLMEngine, body: CompletionBody) -> list[Prompt]:
    room = room_for_prompt(engine.max_model_len, body.token_limit)
    most = most_tokens(engine.max_model_len, body)
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            tokenizer = tokenizer_of(engine, "prompt")
            token_ids = tokenizer.encode(prompt, body.add_special_tokens, max_tokens=most)
        else:
            check_context([Prompt(prompt)], most, "prompt", room=0)
            check_vocabulary(prompt, engine.vocab_size, "prompt")
            token_ids = prompt
        if not token_ids:
            raise InvalidRequestError("prompt has no tokens", param="prompt")
        kept = truncated(token_ids, body, room)
        if not body.echo:
            prompts.append(Prompt(kept))
        elif isinstance(prompt, str) and len(kept) == len(token_ids):
            prompts.append(_text_prompt(engine, prompt, kept, body))
        else:
            prompts.append(_shown_prompt(engine, kept, body))
    return prompts


def _text_prompt(engine: AsyncLLMEngine, text: str, token_ids: list[int], body: CompletionBody) -> Prompt:
    """A prompt whose text is the client's own; where its tokens begin is found only where it is told."""
    offsets = None
    if body.wants_logprobs:
        offsets = tokenizer_of(engine, "prompt").text_offsets(text, body.add_special_tokens)
    return Prompt(token_ids, text, offsets)


def _shown_prompt(engine: AsyncLLMEngine, token_ids: list[int], body: CompletionBody) -> Prompt:
    """A prompt of ids with its text, without a character whose end the prompt does not hold."""
    tokenizer = engine.tokenizer
    positions = TextOffsets(TokenText(tokenizer, body.skip_special_tokens))
    text, offsets = positions.extend(token_ids), positions.offsets
    if tokenizer is not None and tokenizer.decoder_kind == "other":
        # A token's text depends on its neighbours, so where each begins is only near.
        text = tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens)
        offsets = [min(offset, len(text)) for offset in offsets]
    elif tokenizer is not None and tokenizer.strips_first_space and text.startswith(" "):
        text, offsets = text[1:], [max(0, offset - 1) for offset in offsets]
    return Prompt(token_ids, text, offsets)


class CompletionAnswer(Answer):
    """Choice `j` of prompt `i` has the index `i * n + j`; with echo each begins with its prompt."""

    operation = "text_completion"
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"
    body: CompletionBody

    def __init__(self, body: CompletionBody, model: str, work: Work, token_text: TokenText) -> None:
        super().__init__(body, model, work)
        self._prompts = work.prompts
        self._token_text = token_text
        self._cursors: dict[tuple[int, int], ChoiceCursor] = {}
        self._begun: set[int] = set()  # indexes of the choices that have had a chunk

    def pieces(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        prompt = self._prompts[index]
        echoes = self.body.echo and bool(prompt.text or shows_tokens(self.body))
        for choice in output.outputs:
            cursor = self._cursor(index, choice.index)
            if cursor.finished:
                continue
            delta = cursor.advance(choice)
            place = index * self.body.n + choice.index
            begins = place not in self._begun
            if delta or (begins and echoes):
                self._begun.add(place)
                yield self._choice(place, prompt, output, choice, delta, begins)

    def choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        for index, output in enumerate(outputs):
            ranked = output.outputs
            if len(ranked) > self.body.n:
                ranked = sorted(ranked, key=_logprob_per_token, reverse=True)[: self.body.n]
            for rank, choice in enumerate(ranked):
                delta = self._cursor(index, choice.index).advance(choice)
                place = index * self.body.n + rank
                shown = self._choice(place, self._prompts[index], output, choice, delta, begins=True)
                if self.body.prompt_logprobs is not None:
                    shown["prompt_logprobs"] = self._token_text.prompt_json(output.prompt_logprobs or [])
                yield shown

    def _cursor(self, prompt_index: int, choice_index: int) -> ChoiceCursor:
        key = prompt_index, choice_index
        if key not in self._cursors:
            self._cursors[key] = ChoiceCursor(self._token_text, self._prompts[prompt_index], self.body)
        return self._cursors[key]

    def _choice(
        self,
        place: int,
        prompt: Prompt,
        output: RequestOutput,
        choice: CompletionOutput,
        delta: Delta,
        begins: bool,
    ) -> dict[str, Any]:
        echoed = (prompt.text or "") if self.body.echo else ""
        logprobs = None
        if self.body.logprobs is not None:
            builder = CompletionLogprobs(self._token_text)
            if begins and self.body.echo:
                self._add_prompt(builder, prompt, output)
            positions = choice.logprobs or []
            for position in range(delta.first_token, delta.end_token):
                offset = len(echoed) + delta.offsets[position]
                builder.add(choice.token_ids[position], positions[position], offset, self.body.logprobs)
            logprobs = builder.json()
        shown = {
            "index": place,
            "text": echoed + delta.text if begins else delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            shown["token_ids"] = choice.token_ids[delta.first_token : delta.end_token]
            if begins:
                shown["prompt_token_ids"] = prompt.token_ids
        return shown

    def _add_prompt(self, builder: CompletionLogprobs, prompt: Prompt, output: RequestOutput) -> None:
        top = self.body.logprobs or 0
        positions = output.prompt_logprobs or []
        offsets = prompt.offsets or []
        for token_id, offset, logprobs in zip(prompt.token_ids, offsets, positions, strict=True):
            builder.add(token_id, logprobs, offset, top)


def _logprob_per_token(choice: CompletionOutput) -> float:
    return (choice.cumulative_logprob or 0.0) / max(choice.num_tokens, 1)
