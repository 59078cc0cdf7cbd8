"""Long texts: a bound of their tokens that is never too high, and turns for tenants."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from lookonce.config import NANO_FOLDER
from lookonce.errors import BadRequestError, QueueFullError
from lookonce.render.prompt import encoder as encoder_module
from lookonce.render.prompt import long_texts
from lookonce.render.prompt.encoder import load_encoder
from lookonce.render.prompt.long_texts import LongTextThreads, TokenCountBound
from lookonce.render.prompt.tokenizer import Tokenizer
from lookonce.types import last_asked

WORDS = [f"word{number} wood {number * 37} éü 中文字 A\n\t b\u0301" for number in range(200)]
PATIENCE = 100.0


def trained(backend, **options):
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, special_tokens=["<s>", "<eos>"], **options
    )
    backend.train_from_iterator(WORDS, trainer)
    return backend


def byte_level(normalizer=None):
    backend = Backend(models.BPE())
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return trained(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def with_stripping(backend):
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return backend


def sentencepiece():
    backend = Backend(models.BPE(unk_token="<s>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return trained(backend)


def lower_case():
    return byte_level(normalizers.Lowercase())


BACKENDS = {
    "nano": lambda: Tokenizer.load(NANO_FOLDER).backend,
    "byte level": byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "stripping": lambda: with_stripping(byte_level()),
    "sentencepiece": sentencepiece,
}
PIECES = st.sampled_from(
    ["word", "wood", "A ", "A", " ", "  ", "\n", "\t", "é", "e\u0301", "o\u0301", "\u0301",
     "中", "x", "<mask>", "<s>", "<eos>", "<", "|>", "7", "\r\n", "\u3000", "\x85", "\0", "🙂",
     "K", "▁", "ab c"]
)  # fmt: skip


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request):
    return Tokenizer(BACKENDS[request.param]())


@given(text=st.lists(PIECES | st.text(max_size=5), max_size=40).map("".join))
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer, text):
    text = text.encode("utf-8", "replace").decode()
    bound = TokenCountBound(tokenizer)
    assert bound.is_known
    assert bound.at_least(text, 10**9) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_slices_count_as_the_whole(tokenizer, monkeypatch):
    text = "A wood\n word7 éé x " * 20
    bound = TokenCountBound(tokenizer)
    whole = bound.at_least(text, 10**9)
    for size in (1, 2, 7, 64):
        monkeypatch.setattr(long_texts, "SLICE_BYTES", size)
        assert bound.at_least(text, 10**9) == whole


def test_the_bound_is_close_where_it_matters():
    bound = TokenCountBound(Tokenizer.load(NANO_FOLDER))
    assert bound.at_least("A " * 300_000, 10**9) == 600_000
    assert bound.at_least("A " * 300_000, 8_192) < 100_000  # it stops early


def test_a_tokenizer_that_drops_characters_has_no_bound():
    bound = TokenCountBound(Tokenizer(lower_case()))
    assert not bound.is_known
    assert bound.at_least("A b " * 100, 10**9) == 0


@pytest.mark.parametrize("text", ["", "word", "A wood é" * 2000, "<s>word"])
def test_long_and_short_texts_are_tokenized_alike(tokenizer, text):
    for special in (True, False):
        wanted = tokenizer.backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == wanted


def test_a_long_text_that_is_no_unicode_is_a_bad_request(tokenizer):
    with pytest.raises(BadRequestError, match="surrogate"):
        tokenizer.encode("a" * 10_000 + "\ud800")


def test_a_hopeless_text_is_refused_before_it_is_tokenized(monkeypatch):
    encoder = load_encoder(str(NANO_FOLDER), None, None)

    def never(*_: object, **__: object):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "encode", never)
    work = encoder.encode_text("A " * 300_000, add_special_tokens=True, max_tokens=30_000)
    with pytest.raises(BadRequestError, match="at least") as caught:
        asyncio.run(work)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"


def test_while_a_long_text_is_tokenized_other_threads_run():
    """Counted, not timed: the other thread counts on while the text is tokenized."""
    tokenizer = Tokenizer.load(NANO_FOLDER)
    text = "A wood word " * 60_000
    counts = []
    done = threading.Event()

    def count():
        while not done.is_set():
            counts.append(time.perf_counter())
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    began = time.perf_counter()
    tokenizer.encode(text)
    ended = time.perf_counter()
    done.set()
    counter.join()
    meanwhile = [at for at in counts if began < at < began + 0.8 * (ended - began)]
    assert len(meanwhile) > 10


# --- turns ----------------------------------------------------------------------------------------


class Gate:
    """Work that waits."""

    def __init__(self):
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.open.wait(PATIENCE)
        return "done"


def test_no_tenant_has_all_threads():
    async def scenario():
        threads = LongTextThreads()
        gates = [Gate() for _ in range(4)]
        slow = [asyncio.create_task(threads.run(gate, "greedy", 10**6)) for gate in gates]
        await asyncio.to_thread(gates[0].begun.wait, PATIENCE)
        assert await threads.run(lambda: "quick", "other", 20_000) == "quick"
        assert not any(gate.begun.is_set() for gate in gates[1:])
        for gate in gates:
            gate.open.set()
        assert await asyncio.gather(*slow) == ["done"] * 4

    asyncio.run(scenario())


def test_a_caller_that_leaves_leaves_the_queue():
    async def scenario():
        threads = LongTextThreads(max_waiting=1)
        first, second = Gate(), Gate()
        running = asyncio.create_task(threads.run(first, "a", 1))
        await asyncio.to_thread(first.begun.wait, PATIENCE)
        waiting = asyncio.create_task(threads.run(second, "a", 1))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="long texts"):
            await threads.run(lambda: None, "a", 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        third = asyncio.create_task(threads.run(lambda: "third", "a", 1))
        running.cancel()  # what has begun is finished
        await asyncio.sleep(0)
        first.open.set()
        assert await third == "third"
        assert not second.begun.is_set()

    asyncio.run(scenario())


def test_work_whose_caller_left_still_counts_as_its_tenant_s():
    """However often a tenant comes and leaves, it has one thread: the others' is free."""

    async def scenario():
        threads = LongTextThreads(num_threads=2)
        left = Gate()
        for gate in (left, *(Gate() for _ in range(3))):
            asked = asyncio.create_task(threads.run(gate, "leaves", 10**6))
            await asyncio.sleep(0)
            if gate is left:
                await asyncio.to_thread(left.begun.wait, PATIENCE)
            asked.cancel()
            assert not (gate.begun.is_set() and gate is not left)
        stays = Gate()
        waiting = asyncio.create_task(threads.run(stays, "leaves", 1))
        assert await threads.run(lambda: "quick", "other", 1) == "quick"
        assert not stays.begun.is_set()
        stays.open.set()
        left.open.set()
        assert await waiting == "done"

    asyncio.run(scenario())


def test_what_fails_fails_its_caller():
    async def scenario():
        threads = LongTextThreads()

        def broken():
            raise BadRequestError("no")

        with pytest.raises(BadRequestError):
            await threads.run(broken, "a", 1)
        assert await threads.run(lambda: 1, "a", 1) == 1

    asyncio.run(scenario())


def compute(seconds: float) -> None:
    """Take so much CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def next_job(
    *, others: float | None, bursts: float, holds_lock: bool = True, begins: bool = True
):
    """The threads, and the next job of a tenant that has just computed so many bursts; another
    tenant asked so many seconds before."""
    now = 1000.0
    threads = LongTextThreads(clock=lambda: now)
    if others is not None:
        threads.note_asked("other")
        now += others
    threads.note_asked("large")
    seconds = bursts * long_texts.LOCK_BURST_SECONDS
    await threads.run(lambda: compute(seconds), "large", 1, holds_lock=holds_lock)
    job = threads.run(lambda: "done", "large", 1, holds_lock=True, begins=begins)
    return threads, asyncio.create_task(job)


def test_who_computed_its_share_with_the_lock_rests_while_others_ask(monkeypatch):
    monkeypatch.setattr(long_texts, "LOCK_SHARE", 1e-4)  # a rest of minutes

    async def scenario():
        threads, job = await next_job(others=1.0, bursts=2.0)
        for _ in range(3):
            assert await threads.run(lambda: "quick", "other", 1, holds_lock=True) == "quick"
        assert await threads.run(lambda: "short", "large", 1) == "short"
        assert not job.done()
        job.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("nobody_asks", [False, True])
def test_a_rest_ends_once_it_is_paid_for_and_once_nobody_else_asks(monkeypatch, nobody_asks):
    if nobody_asks:
        monkeypatch.setattr(long_texts, "LOCK_SHARE", 1e-4)
        monkeypatch.setattr(last_asked, "OTHERS_SECONDS", 0.5)

    async def scenario():
        threads = LongTextThreads()
        for asked in ("other", "large"):
            threads.note_asked(asked)
        seconds = 2 * long_texts.LOCK_BURST_SECONDS
        await threads.run(lambda: compute(seconds), "large", 1, holds_lock=True)
        job = threads.run(lambda: "done", "large", 1, holds_lock=True, begins=True)
        assert await asyncio.wait_for(job, PATIENCE) == "done"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "case",
    [
        {"others": None, "bursts": 2.0},
        {"others": last_asked.OTHERS_SECONDS, "bursts": 2.0},
        {"others": 1.0, "bursts": 0.5},
        {"others": 1.0, "bursts": 2.0, "holds_lock": False},
        {"others": 1.0, "bursts": 2.0, "begins": False},
    ],
    ids=["alone", "others long ago", "little", "without the lock", "it has begun"],
)
def test_nobody_else_rests(monkeypatch, case):
    monkeypatch.setattr(long_texts, "LOCK_SHARE", 1e-4)

    async def scenario():
        _, job = await next_job(**case)
        assert await asyncio.wait_for(job, PATIENCE) == "done"

    asyncio.run(scenario())


def test_what_was_computed_while_nobody_asked_is_not_paid_for_later(monkeypatch):
    monkeypatch.setattr(long_texts, "LOCK_BURST_SECONDS", 0.01)
    monkeypatch.setattr(long_texts, "LOCK_SHARE", 0.01)

    async def scenario():
        threads = LongTextThreads()
        seconds = 300 * long_texts.LOCK_BURST_SECONDS  # a rest of 300 seconds, were it paid
        await threads.run(lambda: compute(seconds), "large", 1, holds_lock=True)
        threads.note_asked("other")
        for _ in range(2):
            last = threads.run(lambda: compute(0.001), "large", 1, holds_lock=True, begins=True)
            await asyncio.wait_for(last, PATIENCE)

    asyncio.run(scenario())


def test_large_chats_of_one_tenant_have_a_share_while_another_asks(monkeypatch):
    """Through the encoder: the parts of one request go on, however long one of them took; the next
    request waits."""
    monkeypatch.setattr(long_texts, "LOCK_SHARE", 1e-4)
    monkeypatch.setattr(last_asked, "OTHERS_SECONDS", 10 * PATIENCE)
    monkeypatch.setattr(encoder_module, "SAME_REQUEST_SECONDS", 1.0)
    encoder = load_encoder(NANO_FOLDER, None, None)

    async def scenario():
        await encoder.encode_text("x", add_special_tokens=False, tenant="other")

        async def request() -> str:
            await encoder.in_turn_if(True, "large", lambda: compute(1.5))
            return await encoder.in_turn_if(True, "large", lambda: "done")

        first = asyncio.create_task(request())
        assert await asyncio.wait_for(first, PATIENCE) == "done"
        second = asyncio.create_task(request())
        for _ in range(3):
            assert await encoder.in_turn_if(True, "other", lambda: "quick") == "quick"
        assert await encoder.in_turn_if(False, "large", lambda: "small") == "small"
        assert not second.done()
        second.cancel()

    asyncio.run(scenario())
