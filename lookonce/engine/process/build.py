"""Puts an engine together, for the engine process, tests and benchmarks alike.

    assemble         a scheduler and a runner                 → EngineCore, RequestPreprocessor
    EngineThreads    a link: input thread, step loop, and the channel between them

The runner may be the model or a fake, the link a socket or a queue in the same process: this module
needs neither torch nor a socket. `load_engine` calls `assemble` with a loaded model.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

from lookonce.cache.slabs import SlabOwner
from lookonce.core.block_pool import BlockPool
from lookonce.core.encoder_cache import EncoderCache
from lookonce.core.scheduler import Scheduler
from lookonce.core.scheduler_state import SchedulerState
from lookonce.core.state_snapshots import StateSnapshots
from lookonce.engine.process.engine_core import EngineCore, RequestPreprocessor
from lookonce.engine.process.grammar import GrammarCompiler
from lookonce.engine.process.input_thread import InputThread
from lookonce.engine.process.receiver_cache import ReceiverCache
from lookonce.engine.process.step_loop import StepChannel, StepLoop, StopCommand
from lookonce.engine.process_io import EngineSettings
from lookonce.ipc.channel import EngineChannel, EngineLink
from lookonce.types.model import ModelInfo
from lookonce.types.ports import ExternalEncoderCache, ExternalPrefixCache, ModelRunner

logger = logging.getLogger(__name__)

INPUT_STOP_SECONDS = 1.0
"""How long the input thread may take to end."""


def assemble(
    info: ModelInfo,
    runner: ModelRunner,
    settings: EngineSettings,
    pool: BlockPool,
    external: ExternalPrefixCache | None = None,
    grammars: GrammarCompiler | None = None,
    external_outputs: ExternalEncoderCache | None = None,
) -> tuple[EngineCore, RequestPreprocessor]:
    """An engine of a scheduler over `pool` and a `runner` with as many KV blocks.

    `grammars` compiles for the model's tokenizer; None: one is made.

    Raises `ConfigError` for a token budget below the largest item that must not be split.
    """
    encoder_cache = EncoderCache(
        settings.encoder.cache_bytes, info.encoder_row_bytes, settings.encoder.host_cache_bytes
    )
    snapshots = None
    if info.state_bytes:
        num_snapshots = settings.kv.num_snapshots(info.state_bytes)
        snapshots = StateSnapshots(num_snapshots, info.state_bytes)
    scheduler = Scheduler(
        SchedulerState(
            pool,
            encoder_cache,
            prefix_caching=settings.kv.prefix_caching,
            snapshots=snapshots,
        ),
        info,
        settings.scheduler,
        external,
        fail_on_loss=settings.kv.load_failure_policy == "fail",
        external_outputs=external_outputs,
    )
    if grammars is None:
        grammars = GrammarCompiler(settings.model.folder, info.vocab_size, info.eos_token_ids)
    preprocessor = RequestPreprocessor(info, scheduler.validator, grammars.compile)
    core = EngineCore(
        scheduler,
        runner,
        external,
        external_outputs,
        overlapped=settings.scheduler.async_scheduling,
    )
    return core, preprocessor


class EngineThreads:
    """One engine's input thread and step loop over one link.

    start_input ──▶ answers API processes, which wait        (while the model loads)
    open        ──▶ requests are taken
    run_steps   ──▶ the step loop, in the calling thread, until `stop`; then both ends are closed

    The random epoch of its receiver cache tells this engine from earlier ones at the same address.
    """

    def __init__(
        self,
        link: EngineLink,
        *,
        num_senders: int,
        max_queue: int,
        max_sessions: int = 64,
        max_tenant_sessions: int | None = None,
        slab_bytes: int = 0,
    ) -> None:
        """`slab_bytes`: shared memory to lease to API processes; 0: none. Without
        `max_tenant_sessions` one tenant may have all of `max_sessions`."""
        self.slabs = SlabOwner(slab_bytes, wake=link.wake)
        channel = EngineChannel(link, self.slabs.array)
        self.receiver_cache = ReceiverCache(epoch=secrets.randbits(62) + 1)
        self.step_channel = StepChannel(channel.wake, channel.writer())
        self._input = InputThread(
            channel,
            self.receiver_cache,
            self.step_channel,
            self.slabs,
            num_senders=num_senders,
            max_queue=max_queue,
            max_sessions=max_sessions,
            max_tenant_sessions=max_tenant_sessions or max_sessions,
        )
        self._thread: threading.Thread | None = None

    def start_input(
        self,
        on_beat: Callable[[float], None] = lambda stalled: None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the input thread.

        `on_beat` gets the stalled seconds with every heartbeat. `on_broken` is called when the
        thread has raised: the engine receives nothing any more then.
        """

        def receive() -> None:
            try:
                self._input.run(on_beat)
            except BaseException:
                logger.exception("the input thread broke")
                on_broken()

        self._thread = threading.Thread(target=receive, name="input", daemon=True)
        self._thread.start()

    def open(self, preprocessor: RequestPreprocessor) -> None:
        """The model is loaded and warm: take requests."""
        self._input.open(preprocessor)

    def run_steps(self, core: EngineCore) -> None:
        """Step until `stop`, then end the input thread."""
        StepLoop(core, self.step_channel).run()
        self._input.stop()
        if self._thread is not None:
            self._thread.join(INPUT_STOP_SECONDS)

    def stop(self) -> None:
        """End `run_steps` after the step in progress; from any thread or signal handler."""
        self.step_channel.command(StopCommand())
