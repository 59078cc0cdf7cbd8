"""`LLM`: the engine used from Python, without a server.

The engine runs in a process of its own, started with `python -m`, so scripts need no main guard.
The frontend runs on an event loop in a background thread. Calls are synchronous and may come from
any thread of the process that made the `LLM`; a process that is forked from it makes its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import os
import threading
import weakref
from base64 import b64encode
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import AsyncGeneratorType
from typing import Any, Self, TypeGuard, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lookonce.cache.identity import media_hash
from lookonce.config import NANO, Config, Options, SchedulerConfig, resolve
from lookonce.engine.process_io import engine_settings
from lookonce.engine.supervisor.engine_supervisor import EngineSupervisor, OnLoading
from lookonce.engine.supervisor.socket_folder import socket_folder
from lookonce.errors import (
    BadRequestError,
    ConfigError,
    ModelNotFoundError,
    RequestFailedError,
    UnavailableError,
)
from lookonce.frontend.frontend import (
    Frontend,
    engine_client,
    max_prompts_rendered,
    open_frontend,
)
from lookonce.frontend.generation import PromptGeneration, Sample, prepared
from lookonce.frontend.media_injection import (
    ItemOutcome,
    arrays_reader,
    inject_offered,
    offered_items,
)
from lookonce.frontend.model_download import with_local_model
from lookonce.frontend.pooling import (
    Floats,
    check_dimensions,
    pooled_of,
    require_pools,
    vectors,
)
from lookonce.frontend.receipt import reuse_receipt, usage
from lookonce.frontend.responses import ReuseReceipt, StopReason, Usage
from lookonce.frontend.sampling_params import default_sampling
from lookonce.frontend.session import Session, SessionPiece
from lookonce.frontend.tools.calls import ToolCalling, content_of, reader_of, tool_calling
from lookonce.frontend.transcription import (
    Fallback,
    Granularity,
    Task,
    Transcriber,
    TranscriptDone,
    TranscriptionOptions,
)
from lookonce.types.media import MODALITIES, Modality
from lookonce.types.pooling import PoolingInfo
from lookonce.types.request import Overflow, PromptLogprob, RenderedPrompt, TokenLogprob
from lookonce.types.sampling import SamplingParams

Message = dict[str, Any]
DEFAULT_FALLBACK = Fallback()
CANCEL_SECONDS = 5.0
PNG_MODES = frozenset(("1", "L", "LA", "I;16", "P", "RGB", "RGBA"))
OPTION_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
}
Prompt = str | Sequence[int]
Render = Callable[[], Coroutine[Any, Any, RenderedPrompt]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One of the `n` samples of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: StopReason
    logprobs: list[TokenLogprob] | None
    """One per token where `SamplingParams.logprobs` asked for them."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt."""

    prompt_token_ids: list[int]
    outputs: list[SampleOutput]
    usage: Usage
    reuse_receipt: ReuseReceipt
    prompt_logprobs: list[PromptLogprob | None] | None
    """One per token of the prompt where `SamplingParams.prompt_logprobs` asked for them; None for
    the first token and for tokens of media."""

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text


class LLM:
    """A loaded model. `options` are those of `lookonce serve`, with underscores.

    with LLM("nano") as llm:
        print(llm.chat([{"role": "user", "content": "Hello"}])[0].text)

    Raises `ConfigError` for a wrong option and `ModelLoadError` when the model cannot be served.
    """

    def __init__(
        self, model: str = NANO, *, on_loading: OnLoading | None = None, **options: Any
    ) -> None:
        given = Options(model=model, **_checked(options))
        config = _with_queue(with_local_model(resolve(given)))
        # These limit all calls together, whatever thread they come from. Streams are not counted
        # as being answered, so that one that nobody reads does not block others.
        self._answering = asyncio.Semaphore(_max_prompts_answered(config.scheduler))
        self._rendering = asyncio.Semaphore(max_prompts_rendered(config.media))
        self._loop = _LoopThread()
        self._stack = AsyncExitStack()
        self._end = weakref.finalize(self, _end_all, self._stack, self._loop)
        try:
            self._frontend = self._loop.run(self._open(config, on_loading))
        except BaseException:
            self.close()
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to each of several. Messages are OpenAI's; a part
        `{"type": "image_pil", "image_pil": picture}` holds a Pillow image, as in vLLM. `lora` is
        the name of an adapter. Raises `ModelNotFoundError` for one that is not loaded."""
        renders = [
            partial(self._render_chat, c, cache_salt, lora_name=self._lora_name(lora))
            for c in _conversations(messages)
        ]
        sampling, tools = self._for_chat(sampling_params)
        return self._loop.run(self._answer_all(renders, sampling, tools))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Continuations of one prompt, or of each of several, as text or token ids; `lora` as in
        `chat`."""
        name = self._lora_name(lora)
        renders = [partial(self._render_prompt, p, cache_salt, name) for p in _prompts(prompts)]
        return self._loop.run(self._answer_all(renders, self._sampling(sampling_params)))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        cache_salt: str | None = None,
    ) -> list[NDArray[np.float32]]:
        """The vector [W] of each text, list of token ids or conversation, in which pictures may be;
        [tokens, W] from a model that gives one of each token, [labels] logits from one that
        classifies, and pairs [n, 2] of token id and weight from one that is sparse.

        `dimensions` keeps the leading numbers; `normalize` None: as the model says. Raises
        `BadRequestError`, also for a model that generates.
        """
        if (prompts is None) == (messages is None):
            raise BadRequestError("give prompts or messages, one of them", param="prompts")
        pooling = require_pools(self._frontend.engine.model)
        check_dimensions(dimensions, pooling)
        options = {"add_generation_prompt": False}
        renders: list[Render] = (
            [partial(self._render_prompt, each, cache_salt) for each in _prompts(prompts)]
            if prompts is not None
            else [
                partial(self._render_chat, each, cache_salt, options)
                for each in _conversations(messages or ())
            ]
        )
        pooled = self._loop.run(self._pool_all(renders, pooling))
        if pooling.kind == "sparse":
            return pooled
        if pooling.scores:
            return [each[0] for each in pooled]
        found = [
            vectors(each, pooling, dimensions=dimensions, normalize=normalize) for each in pooled
        ]
        return found if pooling.kind == "all" else [each[0] for each in found]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> Iterator[str]:
        """The first sample's text as it comes; leaving the iterator aborts.

        `on_finish` is called with the whole answer, in another thread, before the iterator ends.
        """
        name = self._lora_name(lora)
        render = partial(self._render_chat, _with_urls(messages), None, lora_name=name)
        texts = self._stream(render, *self._for_chat(sampling_params), on_finish)
        try:
            while (text := self._loop.run(_next(texts))) is not None:
                yield text
        finally:
            with suppress(UnavailableError):  # the LLM was closed: the stream has ended, too
                self._loop.run(_ended(texts))

    def session(
        self,
        messages: Sequence[Message] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt: Prompt | None = None,
        answer: bool = True,
        overflow: Overflow = "end",
        keep_tokens: int | None = None,
        lora: str | None = None,
        cache_salt: str | None = None,
    ) -> LiveSession:
        """A live session that begins with messages, or with a plain prompt of text or token ids.

        with llm.session([{"role": "user", "content": "Hello"}]) as session:
            print(session.answer())
            session.append([{"role": "user", "content": "And now?"}])
            print(session.answer())

        Without `answer` the opening is not answered. Where every layer of the model attends in a
        sliding window the session has no end. Otherwise it ends at the model's context, or, with
        `overflow="compact"`, drops its middle then and keeps `keep_tokens` (None: the opening) and
        the newest part.
        """
        opening = Session.open(
            self._frontend,
            None if messages is None else list(messages),
            prompt=prompt if prompt is None or isinstance(prompt, str) else list(prompt),
            sampling=self._sampling(sampling_params),
            answer=answer,
            overflow=overflow,
            keep_tokens=keep_tokens,
            cache_salt=cache_salt,
            lora_name=self._lora_name(lora),
        )
        return LiveSession(self._loop.run(opening), self._loop.run)

    def transcribe(
        self,
        audio: str | Path | bytes,
        *,
        language: str | None = None,
        prompt: str = "",
        task: Task = "transcribe",
        temperature: float = 0.0,
        fallback: Fallback | None = DEFAULT_FALLBACK,
        timestamps: Collection[Granularity] = (),
        cache_salt: str | None = None,
    ) -> TranscriptDone:
        """The text of a sound: a file's path, or the bytes of a WAV, FLAC, Ogg or MP3 file.

        `task` "translate" answers in English. At temperature 0 an encoder-decoder (Whisper) tries
        again at higher ones where a text does not meet the thresholds of `fallback`; None: never.
        `timestamps` may hold "segment" and "word". Raises `BadRequestError` for what the model
        cannot do.
        """
        data = audio if isinstance(audio, bytes) else Path(audio).read_bytes()
        options = TranscriptionOptions(
            language=language,
            prompt=prompt,
            temperature=temperature,
            fallback=fallback if temperature == 0.0 else None,
            task=task,
            timestamps=frozenset(timestamps),
        )
        return self._loop.run(self._transcribe(data, options, cache_salt))

    def inject_into_mm_cache(
        self,
        mm_hashes: Mapping[Modality, Sequence[str]],
        mm_kwargs: Mapping[Modality, Sequence[Mapping[str, Any]]],
        *,
        cache_salt: str | None = None,
    ) -> dict[str, list[ItemOutcome]]:
        """Put items that somebody else processed into the processor cache; answers what became of
        each.

        `mm_kwargs` holds one mapping of NumPy arrays or torch tensors per hash, as the model's
        processor makes them; they are copied. With a hash from `media_hash` the item is used
        wherever a request sends those media. An invalid item is rejected alone. Raises
        `BadRequestError` where hashes and items do not match.
        """
        offered = offered_items(mm_hashes, mm_kwargs, arrays_reader)
        return self._loop.run(
            inject_offered(self._frontend, offered, tenant="", cache_salt=cache_salt, trusted=True)
        )

    def media_hash(self, data: bytes, *, modality: Modality) -> str:
        """The name of encoded media (a PNG file, say) in the caches of this model, hex digits.

        Raises `BadRequestError` for anything else: no request finds pixels by their own hash.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise BadRequestError("data must be the bytes of encoded media", param="data")
        if modality not in MODALITIES:
            raise BadRequestError(
                f"modality must be one of {', '.join(MODALITIES)}", param="modality"
            )
        return media_hash(
            data,
            modality=modality,
            fingerprint=self._frontend.renderer.fingerprint,
            algorithm=self._frontend.config.media.hash_algorithm,
        ).hex()

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What the model's `generation_config.json` recommends, with `changes`."""
        return msgspec.structs.replace(default_sampling(self._frontend.defaults), **changes)

    @property
    def model_name(self) -> str:
        """The name under which it was loaded, or `served_model_name`."""
        return self._frontend.config.model.served_name

    def load_lora(
        self, name: str, folder: str | os.PathLike[str], *, replace: bool = False
    ) -> None:
        """Load a LoRA adapter, for an `LLM` that was made with `lora` or `lora_dir`. With `replace`
        it takes the place of another one of this name. Raises `BadRequestError` why it cannot be
        served."""
        path = str(Path(folder).resolve())
        self._loop.run(self._frontend.engine.load_adapter(name, path, replace=replace))

    def unload_lora(self, name: str) -> None:
        """Forget a LoRA adapter; what runs with it goes on. Raises `ModelNotFoundError`."""
        self._loop.run(self._frontend.engine.unload_adapter(name))

    @property
    def loras(self) -> list[str]:
        """The names of the LoRA adapters that are loaded."""
        return self._frontend.engine.adapters.names()

    def _lora_name(self, name: str | None) -> str:
        """Empty for None. Raises `ModelNotFoundError`."""
        if name is not None and self._frontend.engine.adapters.get(name) is None:
            raise ModelNotFoundError(f"there is no adapter {name!r}", param="lora")
        return name or ""

    def stats(self) -> dict[str, float]:
        """The engine's counters."""
        return self._loop.run(self._frontend.engine.stats())

    def close(self) -> None:
        """Ends the engine process. May be called again; without a call it is done at exit."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on the event loop --------------------------------------------------------------------

    async def _open(self, config: Config, on_loading: OnLoading | None) -> Frontend:
        """Start everything; raises why the engine will never serve."""
        supervisor = EngineSupervisor(
            engine_settings(config),
            stall_timeout=config.channel.stall_timeout,
            on_loading=on_loading,
        )
        self._stack.enter_context(socket_folder(config.channel.address))
        running = asyncio.create_task(supervisor.run())
        self._stack.push_async_callback(_end_engine, supervisor, running)
        client = await self._stack.enter_async_context(engine_client(config))
        frontend = await self._stack.enter_async_context(open_frontend(config, client))
        ready = asyncio.create_task(client.wait_ready())
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            ready.cancel()
            running.result()
        return frontend

    def _sampling(self, asked: SamplingParams | None) -> SamplingParams:
        """Raises `BadRequestError`."""
        if asked is None:
            return default_sampling(self._frontend.defaults)
        if not isinstance(asked, SamplingParams):
            raise BadRequestError("sampling_params must be a SamplingParams")
        return asked

    def _for_chat(self, asked: SamplingParams | None) -> tuple[SamplingParams, ToolCalling | None]:
        """How to sample a chat's answer, and how to parse it: None where it is plain text.

        Raises `BadRequestError`.
        """
        sampling, tools = self._sampling(asked), tool_calling(None, self._frontend.tool_dialect)
        return (sampling if tools is None else tools.constrain(sampling)), tools

    async def _render_chat(
        self,
        messages: list[Message],
        cache_salt: str | None,
        options: Mapping[str, Any] | None = None,
        *,
        lora_name: str = "",
    ) -> RenderedPrompt:
        async with self._rendering:
            rendered = await self._frontend.renderer.render_chat(
                messages, cache_salt=cache_salt, options=options
            )
        rendered.lora_name = lora_name
        return rendered

    async def _render_prompt(
        self,
        prompt: str | list[int],
        cache_salt: str | None,
        lora_name: str = "",
    ) -> RenderedPrompt:
        async with self._rendering:
            rendered = await self._frontend.renderer.render_completion(
                prompt, cache_salt=cache_salt
            )
        rendered.lora_name = lora_name
        return rendered

    async def _transcribe(
        self, data: bytes, options: TranscriptionOptions, cache_salt: str | None
    ) -> TranscriptDone:
        async with self._answering:
            events = Transcriber(self._frontend).transcribe(data, options, cache_salt=cache_salt)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, TranscriptDone):
                        return event
        raise RequestFailedError("the transcription ended without a result")

    async def _answer_all(
        self,
        renders: Sequence[Render],
        sampling: SamplingParams,
        tools: ToolCalling | None = None,
    ) -> list[RequestOutput]:
        """All answers, in order; the first failure ends the others and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._answer(render, sampling, tools)) for render in renders
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _pool_all(self, renders: Sequence[Render], pooling: PoolingInfo) -> list[Floats]:
        """All results, in order; the first failure ends the others and is raised."""

        async def pool(render: Render) -> Floats:
            async with self._answering:
                with prepared(
                    self._frontend, await render(), SamplingParams(max_tokens=1), pools=True
                ) as generation:
                    async with aclosing(generation.pieces()) as pieces:
                        async for _ in pieces:
                            pass
                    return pooled_of(generation, pooling)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(pool(render)) for render in renders]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer(
        self, render: Render, sampling: SamplingParams, tools: ToolCalling | None
    ) -> RequestOutput:
        async with self._answering:
            with self._prepared(await render(), sampling, tools) as generation:
                samples = [Sample() for _ in range(sampling.n)]
                async with aclosing(generation.pieces()) as pieces:
                    async for piece in pieces:
                        samples[piece.index].take(piece)
                return _request_output(generation, samples, tools)

    async def _stream(
        self,
        render: Render,
        sampling: SamplingParams,
        tools: ToolCalling | None,
        on_finish: Callable[[RequestOutput], None] | None,
    ) -> AsyncGenerator[str, None]:
        reader = reader_of(tools)
        with self._prepared(await render(), sampling, tools) as generation:
            samples = [Sample() for _ in range(sampling.n)]
            async with aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    samples[piece.index].take(piece)
                    if piece.index == 0:
                        last = piece.finish_reason is not None
                        yield content_of(reader.push(piece.text, last=last))
            if on_finish is not None:
                on_finish(_request_output(generation, samples, tools))

    def _prepared(
        self, rendered: RenderedPrompt, sampling: SamplingParams, tools: ToolCalling | None
    ) -> AbstractContextManager[PromptGeneration]:
        keep = () if tools is None else tools.markers
        return prepared(self._frontend, rendered, sampling, keep=keep)


class LiveSession:
    """A live session as `LLM.session` opens it; calls are synchronous and may come from any thread.

    Iterate for the pieces of its answers. Raises what ended the session.
    """

    def __init__(self, session: Session, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._session = session
        self._run = run

    def append(
        self,
        messages: Sequence[Message] | None = None,
        *,
        prompt: Prompt | None = None,
        answer: bool = True,
        interrupt: bool = False,
        max_tokens: int | None = None,
    ) -> int:
        """Append messages with text, pictures and sound, or plain text or token ids; the number
        that the pieces of their answer have.

        Waits while more was sent than is computed. An answer that runs is ended with `interrupt`,
        and waited for otherwise. Without `answer` nothing is generated.
        """
        if (messages is None) == (prompt is None):
            raise BadRequestError("messages or a prompt are appended")
        if messages is not None:
            work = self._session.append(
                _with_urls(messages), answer=answer, interrupt=interrupt, max_tokens=max_tokens
            )
        else:
            given = prompt if isinstance(prompt, str) else list(prompt or ())
            work = self._session.append_prompt(
                given, answer=answer, interrupt=interrupt, max_tokens=max_tokens
            )
        return cast("int", self._run(work))

    def __iter__(self) -> Iterator[SessionPiece]:
        while (piece := self._run(_next(self._session))) is not None:
            yield piece

    def answer(self) -> str:
        """The text of the next answer, once it has ended."""
        return cast("str", self._run(self._session.answer()))

    @property
    def is_slowed(self) -> bool:
        """The next `append` waits: more was sent than is computed, or answers are not read."""
        return self._session.is_slowed

    def close(self) -> None:
        """Ends the session; nothing where its LLM is closed."""
        with suppress(UnavailableError):
            self._run(_closed(self._session))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _closed(session: Session) -> None:
    session.close()


class _LoopThread:
    """An event loop in a background thread of this process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="lookonce-llm", daemon=True
        )
        self._thread.start()

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked later, where the thread does not run."""
        return os.getpid() == self._pid

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; whatever interrupts the wait cancels it.

        Raises `UnavailableError` after `close`, in a forked process and on the loop's own thread.
        """
        try:
            future = self._begin(work)
        except UnavailableError:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._is_closed:
                raise UnavailableError("this LLM was closed") from None
            raise
        except BaseException:
            future.cancel()
            raise

    def close(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` as the last one, end the calls that still run, and end the thread."""
        with self._lock:
            self._is_closed = True
        # At interpreter exit executors take no more work; everything that needs none is still done.
        with suppress(RuntimeError):
            self._begun(work).result()
        self._begun(_cancel_other_tasks()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if not self.is_of_this_process:
            raise UnavailableError("this LLM is of the process that this one was forked from")
        if self.is_this_thread:
            raise UnavailableError("an LLM cannot be called from its own callbacks")
        with self._lock:  # what begins before `close` is cancelled by it
            if self._is_closed:
                raise UnavailableError("this LLM is closed")
            return self._begun(work)

    def _begun(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _cancel_other_tasks() -> None:
    """Cancel what runs on this event loop, and wait for its end, `CANCEL_SECONDS` at most."""
    others = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_SECONDS)


def _end_all(stack: AsyncExitStack, loop: _LoopThread) -> None:
    """Called once: by `LLM.close`, by the garbage collector or at exit."""
    if not loop.is_of_this_process:  # engine and sockets are the other process's
        return
    if loop.is_this_thread:  # the garbage collector runs on any thread
        threading.Thread(target=_end_all, args=(stack, loop), name="lookonce-llm-end").start()
        return
    loop.close(stack.aclose())


async def _end_engine(supervisor: EngineSupervisor, running: asyncio.Task[None]) -> None:
    await supervisor.stop()
    await asyncio.gather(running, return_exceptions=True)


def _max_prompts_answered(scheduler: SchedulerConfig) -> int:
    """Twice as many prompts as the engine computes side by side, so that its batch stays full."""
    return 2 * scheduler.max_num_seqs


def _with_queue(config: Config) -> Config:
    """With an engine queue that never refuses the prompts of `LLM`, which limits them itself.

    The engine's estimate of how many wait may include prompts that a failed call left behind.
    """
    needed = 4 * _max_prompts_answered(config.scheduler)
    scheduler = replace(config.scheduler, max_queue=max(config.scheduler.max_queue, needed))
    return replace(config, scheduler=scheduler)


async def _ended(texts: AsyncGenerator[str, None]) -> None:
    """Close `texts`, once a call that was interrupted has left it."""
    stream = cast("AsyncGeneratorType[str, None]", texts)
    while stream.ag_running:  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.001)
    await texts.aclose()


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[Message]]:
    """One conversation or several. Raises `BadRequestError`."""
    if not _is_list(messages):
        raise BadRequestError("messages must be a list of messages, or a list of such lists")
    if not messages or not _is_list(messages[0]):
        return [_with_urls(cast("Sequence[Message]", messages))]
    return [_with_urls(each) for each in cast("Sequence[Sequence[Message]]", messages)]


def _with_urls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with data URLs of PNG files for Pillow images. Raises `BadRequestError`."""
    found = list(messages)
    for number, message in enumerate(found):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        parts = [
            _with_url(part, f"messages[{number}].content[{place}]")
            for place, part in enumerate(content)
        ]
        found[number] = {**message, "content": parts}
    return found


def _with_url(part: object, param: str) -> object:
    if not isinstance(part, dict) or part.get("type") != "image_pil":
        return part
    picture = part.get("image_pil")
    if not isinstance(picture, Image.Image):
        raise BadRequestError(f"{param}.image_pil must be a Pillow image", param=param)
    file = io.BytesIO()
    kept = picture if picture.mode in PNG_MODES else picture.convert("RGB")
    kept.save(file, "PNG", compress_level=1)
    url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    rest = {name: value for name, value in part.items() if name != "image_pil"}
    return {**rest, "type": "image_url", "image_url": {"url": url}}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` whose types are right. Raises `ConfigError` that names a wrong one."""
    checked = dict(options)
    limits = checked.get("limit_mm_per_prompt")
    if isinstance(limits, Mapping):  # as vLLM takes them
        checked["limit_mm_per_prompt"] = ",".join(f"{key}={limits[key]}" for key in limits)
    adapters = checked.get("lora")
    if isinstance(adapters, Mapping):
        adapters = [f"{name}={os.fspath(folder)}" for name, folder in adapters.items()]
    if adapters is not None:
        checked["lora"] = (adapters,) if isinstance(adapters, str) else tuple(adapters)
    for field in fields(Options):
        value = checked.get(field.name)
        kind = OPTION_KINDS.get(str(field.type).removesuffix(" | None"))
        if value is None or kind is None:
            continue
        if isinstance(value, os.PathLike):
            value = checked[field.name] = os.fspath(value)
        if isinstance(value, bool) or not isinstance(value, kind[0]):
            raise ConfigError(f"{field.name} must be {kind[1]}, got {repr(value)[:100]}")
    return checked


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One prompt or several, each as text or a list of token ids. Raises `BadRequestError`."""
    if not _is_list(prompts) or (len(prompts) and all(map(_is_token_id, prompts))):
        return [_prompt(prompts, "prompts")]
    return [_prompt(prompt, f"prompts[{n}]") for n, prompt in enumerate(prompts)]


def _prompt(prompt: object, param: str) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if _is_list(prompt) and all(map(_is_token_id, prompt)):
        return list(map(int, prompt))
    raise BadRequestError(
        f"{param}: a prompt is a text or a list of token ids; pictures and sound go into messages, "
        "as in LLM.chat",
        param=param,
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _content(text: str, tools: ToolCalling | None) -> str:
    """The content of a chat's answer, without reasoning that its format separates."""
    return content_of(reader_of(tools).push(text, last=True))


def _request_output(
    generation: PromptGeneration, samples: Sequence[Sample], tools: ToolCalling | None
) -> RequestOutput:
    asked = generation.sampling.logprobs is not None
    return RequestOutput(
        prompt_token_ids=generation.rendered.token_ids,
        outputs=[
            SampleOutput(
                index=index,
                text=_content("".join(sample.text), tools),
                token_ids=sample.token_ids,
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
                logprobs=sample.logprobs if asked else None,
            )
            for index, sample in enumerate(samples)
        ],
        usage=usage([generation]),
        reuse_receipt=reuse_receipt([generation]),
        prompt_logprobs=generation.prompt_logprobs,
    )
