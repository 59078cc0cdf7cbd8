"""The link's two ends over a real socket: names, users, slow and malformed peers, threads."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from lookonce.ipc.framing import HEADER, MARK, SLICE_BYTES, close_fds, greeting, message_pieces
from lookonce.ipc.socket_client_link import SocketClientLink
from lookonce.ipc.socket_engine_link import SocketEngineLink

PATIENCE = 100.0


class Engine:
    """An engine's end whose thread polls until `stop`; it keeps what comes."""

    def __init__(self, path, **options):
        self.link = SocketEngineLink(path, **options)
        self.received = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stopping:
            self.received += [
                (sender, [bytes(frame) for frame in frames])
                for sender, frames in self.link.poll(PATIENCE)
            ]
        self.link.close()

    def stop(self):
        self._stopping = True
        self.link.wake()
        self._thread.join()


class Client:
    """An API process's end; it keeps what comes."""

    def __init__(self, path, name="api", **options):
        self.link = SocketClientLink(path, name, **options)
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self.received = []
        self.num_ups = 0
        self.link.open(self)

    def link_up(self):
        self.num_ups += 1
        self.up.set()

    def link_down(self):
        self.down.set()

    def link_frames(self, frames, fds=()):
        if frames[0] == b"raise":
            raise RuntimeError("cannot be taken")
        self.received.append(([bytes(frame) for frame in frames], fds))


@pytest.fixture
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("s") / "engine.sock")


@pytest.fixture
def engine(path):
    before = len(os.listdir("/proc/self/fd"))
    engine = Engine(path)
    yield engine
    engine.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def run(scenario):
    async def limited():
        async with asyncio.timeout(PATIENCE):
            await scenario

    asyncio.run(limited())


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.005)


@asynccontextmanager
async def client(path, name="api", **options):
    client = Client(path, name, **options)
    try:
        await client.up.wait()
        yield client
    finally:
        client.link.close()


@contextmanager
def raw_peer(path, *pieces):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        for piece in pieces:
            peer.sendall(piece)
        yield peer


def test_what_is_sent_soon_keeps_its_order_and_comes_whole(engine, path):
    """Short messages are joined, long ones are not, and whatever is sent at once comes between."""
    sent = [(kind, bytes([kind]) * length) for kind in range(3) for length in (1, 5_000, 300_000)]

    async def scenario():
        async with client(path) as api:
            for soon, data in sent:
                (api.link.send_soon if soon else api.link.send)([data])
            api.link.send_soon([b"last", b"of two frames"])
            await until(lambda: len(engine.received) == len(sent) + 1)

    run(scenario())
    expected = [("api", [data]) for _, data in sent]
    assert engine.received == [*expected, ("api", [b"last", b"of two frames"])]


def test_what_is_to_be_sent_soon_is_dropped_with_the_connection(engine, path):
    async def scenario():
        async with client(path) as api:
            api.link.send_soon([b"never"])
            api.link.close()
            await asyncio.sleep(0)
        async with client(path, "other") as api:
            api.link.send([b"something"])
            await until(lambda: engine.received)

    run(scenario())
    assert engine.received == [("other", [b"something"])]


def wire(*frames):
    return b"".join(bytes(piece) for piece in message_pieces(frames))


# --- names and users -----------------------------------------------------------------------------


def test_a_sender_that_connects_again_takes_its_name_over(path, engine):
    async def scenario():
        with raw_peer(path, greeting("api")) as earlier:
            await asyncio.to_thread(earlier.recv, 100)
            async with client(path) as later:
                assert await asyncio.to_thread(earlier.recv, 100) == b""
                assert engine.link.send("api", [b"to the later one"])
                later.link.send([b"from the later one"])
                await until(lambda: later.received and engine.received)
        assert later.received == [([b"to the later one"], ())]
        assert engine.received == [("api", [b"from the later one"])]

    run(scenario())


def test_names_are_told_apart_byte_by_byte(path, engine):
    async def scenario():
        async with client(path, "\xff\xfe"), client(path, "\xff"):
            assert engine.link.send("\xff\xfe", [b"x"])
            assert not engine.link.send("\xfe", [b"x"])

    run(scenario())


def test_an_engine_replaces_the_socket_that_an_earlier_one_has_left(path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    engine = Engine(path)

    async def scenario():
        async with client(path):
            pass

    try:
        run(scenario())
    finally:
        engine.stop()


def another_user(link):
    return os.geteuid() + 1


def test_an_engine_refuses_another_user(path, caplog):
    engine = Engine(path, peer_uid=another_user)

    async def scenario():
        refused = Client(path)
        await until(lambda: "refused a connection" in caplog.text)
        assert not refused.num_ups
        refused.link.close()

    with caplog.at_level(logging.ERROR):
        try:
            run(scenario())
        finally:
            engine.stop()
    assert f"belongs to user {os.geteuid() + 1}" in caplog.text


def test_an_api_process_refuses_another_user_s_engine_and_says_so_once(path, engine, caplog):
    tries = []

    def counted(link):
        tries.append(link)
        return another_user(link)

    async def scenario():
        refusing = Client(path, peer_uid=counted)
        await until(lambda: len(tries) > 2)
        assert not refusing.num_ups
        refusing.link.close()

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert caplog.text.count("belongs to user") == 1


# --- malformed and slow peers --------------------------------------------------------------------


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        greeting(""),
        greeting("rogue") + bytes(100),
        greeting("rogue") + wire(b"fine")[:-1] + b"e" + HEADER.pack(1 << 62, 0, 0, MARK),
        greeting("rogue") + HEADER.pack(1, 0, 3, MARK) + b"x",
    ],
)
def test_a_malformed_peer_ends_its_own_connection_alone(path, engine, caplog, nonsense):
    async def scenario():
        async with client(path) as other:
            with raw_peer(path, nonsense) as rogue:
                while await asyncio.to_thread(rogue.recv, 100):
                    pass
            other.link.send([b"still here"])
            await until(lambda: ("api", [b"still here"]) in engine.received)
            assert other.num_ups == 1

    with caplog.at_level(logging.ERROR), suppress(ConnectionResetError):
        run(scenario())  # reset: it was not read to the end
    assert "is cut off" in caplog.text


def test_descriptors_to_the_engine_end_the_connection(path, engine, caplog):
    async def scenario():
        with raw_peer(path, greeting("rogue")) as rogue:
            message = HEADER.pack(1, 0, 1, MARK) + b"x"
            socket.send_fds(rogue, [message], [rogue.fileno()])
            while await asyncio.to_thread(rogue.recv, 100):
                pass

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "1 descriptors declared, 0 have come" in caplog.text


def test_a_malformed_engine_is_left_and_tried_again(path, caplog):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        async def scenario():
            lost = Client(path)
            for _ in range(2):
                link, _ = await asyncio.to_thread(listener.accept)
                with link:
                    link.sendall(greeting() + wire(b"fine"))
                    await lost.up.wait()
                    link.sendall(bytes(50))
                    await lost.down.wait()
                    lost.up.clear()
                    lost.down.clear()
            lost.link.close()
            assert lost.received == 2 * [([b"fine"], ())]
            assert lost.num_ups == 2

        with caplog.at_level(logging.ERROR):
            run(scenario())
    assert "a header without its mark" in caplog.text


def test_a_message_that_cannot_be_taken_is_logged_and_the_next_one_comes(path, engine, caplog):
    async def scenario():
        async with client(path) as api:
            engine.link.send("api", [b"raise"])
            engine.link.send("api", [b"next"])
            await until(lambda: api.received)
            assert api.received == [([b"next"], ())]

    run(scenario())
    assert "cannot be taken" in caplog.text


def test_a_reader_that_is_stuck_blocks_neither_sending_threads_nor_other_readers(path, engine):
    async def scenario():
        with raw_peer(path, greeting("stuck")) as stuck:
            await asyncio.to_thread(stuck.recv, 100)
            async with client(path) as api:
                for number in range(50):
                    assert engine.link.send("stuck", [b"%d" % number, bytes(1_000_000)])
                    assert engine.link.send("api", [b"%d" % number])
                await until(lambda: len(api.received) == 50)
                api.link.send([b"heard"])
                await until(lambda: engine.received)
            # What it has not read is kept: it gets everything once it reads.
            size = 50 * (HEADER.size + 8 + 1_000_000) + sum(len(str(n)) for n in range(50))
            left = size
            while left:
                left -= len(await asyncio.to_thread(stuck.recv, 1 << 20))
        await until(lambda: not engine.link.send("stuck", [b"x"]))

    run(scenario())


def test_the_event_loop_does_other_work_while_large_messages_pass(path, engine):
    """It runs between two slices, so at least once for each of them."""
    size, turns = 20_000_000, 0

    async def scenario():
        nonlocal turns
        async with client(path) as api:
            api.link.send([b"large", bytes(size)])
            while not engine.received:
                turns += 1
                await asyncio.sleep(0)
            engine.link.send("api", [b"large", bytes(size)])
            while not api.received:
                turns += 1
                await asyncio.sleep(0)

    run(scenario())
    assert turns >= 2 * (size // SLICE_BYTES)


def test_too_few_descriptors_for_a_connection_delay_it(path, engine, monkeypatch, caplog):
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def failing(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)

    async def scenario():
        async with client(path):
            assert not failures

    run(scenario())
    assert "cannot be connected now: Too many open files" in caplog.text


# --- threads -------------------------------------------------------------------------------------


def test_each_thread_s_messages_keep_their_order_whatever_the_socket_takes(path, engine):
    threads, count = 4, 150
    sizes = (0, 3000, 5000, 100_000)

    def speak(thread):
        for number in range(count):
            head = struct.pack("<2I", thread, number)
            assert engine.link.send("api", [head, bytes(sizes[(thread + number) % 4])])

    async def scenario():
        async with client(path) as api:
            speaking = asyncio.gather(*(asyncio.to_thread(speak, t) for t in range(threads)))
            await until(lambda: len(api.received) == threads * count)
            await speaking
        heard = [struct.unpack("<2I", frames[0]) for frames, _ in api.received]
        for thread in range(threads):
            assert [n for t, n in heard if t == thread] == list(range(count))
        assert all(
            len(frames[1]) == sizes[sum(head) % 4]
            for (frames, _), head in zip(api.received, heard, strict=True)
        )

    run(scenario())


def test_threads_that_send_while_the_engine_closes_are_told(path):
    before = len(os.listdir("/proc/self/fd"))
    engine = Engine(path)

    def speak():
        count = 0
        while engine.link.send("api", [b"x", bytes(10_000)]):
            count += 1
        return count

    async def scenario():
        async with client(path) as api:
            speaking = asyncio.gather(*(asyncio.to_thread(speak) for _ in range(3)))
            await until(lambda: len(api.received) > 100)
            await asyncio.to_thread(engine.stop)
            await speaking
            await api.down.wait()
        assert not engine.link.send("api", [b"x"])
        engine.link.wake()

    run(scenario())
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_sent_before_the_end_is_still_written(path):
    engine = Engine(path)

    async def scenario():
        async with client(path) as api:
            for number in range(20):
                engine.link.send("api", [b"%d" % number, bytes(100_000)])
            await asyncio.to_thread(engine.stop)
            await api.down.wait()
        assert [frames[0] for frames, _ in api.received] == [b"%d" % n for n in range(20)]

    run(scenario())


# --- descriptors ---------------------------------------------------------------------------------


def test_descriptors_reach_an_api_process_that_expects_them(path, engine):
    async def scenario():
        async with client(path) as api:
            api.link.expect_fds(True)
            out, into = os.pipe()
            assert engine.link.send("api", [b"plain"])
            assert engine.link.send("api", [b"lease", bytes(500_000)], [into])
            assert engine.link.send("api", [b"plain"])
            os.close(into)
            await until(lambda: len(api.received) == 3)
            [(_, none), (frames, fds), (_, none_again)] = api.received
            assert (frames[0], none, none_again) == (b"lease", (), ())
            os.write(fds[0], b"through")
            assert os.read(out, 10) == b"through"
            close_fds([out, *fds])

    run(scenario())


def test_descriptors_that_come_unexpected_end_the_connection_and_are_closed(path, engine, caplog):
    async def scenario():
        async with client(path) as api:
            engine.link.send("api", [b"lease"], [0])
            await api.down.wait()
            api.up.clear()
            await api.up.wait()
            assert not api.received

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "1 descriptors declared, 0 have come" in caplog.text


def test_descriptors_for_a_sender_that_leaves_unread_are_closed(path, engine):
    async def scenario():
        with raw_peer(path, greeting("stuck")) as stuck:
            await asyncio.to_thread(stuck.recv, 100)
            for _ in range(20):
                assert engine.link.send("stuck", [b"lease", bytes(200_000)], [0])
        await until(lambda: not engine.link.send("stuck", [b"x"]))

    run(scenario())
