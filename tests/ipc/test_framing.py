"""Framing: what is sent arrives, however the bytes are cut; what is malformed is refused."""

from __future__ import annotations

import os
import resource
import socket
import threading
from contextlib import ExitStack, closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.errors import ProtocolError
from lookonce.ipc import framing
from lookonce.ipc.framing import (
    GREETING,
    HEADER,
    MAGIC,
    MARK,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    OWN_BUFFER_BYTES,
    SCRATCH_BYTES,
    SLICE_BYTES,
    FrameReader,
    MessageSocket,
    SendQueue,
    close_fds,
    greeting,
    message_pieces,
)
from lookonce.ipc.peer import peer_uid, require_same_user

PATIENCE = 100.0
GREETED = greeting("me")
SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(0, 100_000),
    st.sampled_from([OWN_BUFFER_BYTES, OWN_BUFFER_BYTES + 1, SCRATCH_BYTES, 4095, 4096]),
)
FRAMES = st.lists(SIZES, min_size=1, max_size=5)
"""The bytes of each frame."""


def built(sizes):
    return [bytes([size % 251]) * size for size in sizes]


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def nothing_left_open():
    before = num_fds()
    yield
    assert num_fds() == before


@contextmanager
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def wire(*messages, name="me"):
    return greeting(name) + b"".join(bytes(p) for m in messages for p in message_pieces(m))


def fed(reader, data, step=SCRATCH_BYTES):
    """The messages that the reader makes of `data`, given in pieces of up to `step` bytes."""
    steps = iter(step if isinstance(step, list) else [])
    messages = []
    while data:
        limit = max(1, next(steps, 10_000)) if isinstance(step, list) else step
        room = reader.buffer(limit)[:limit]
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        messages += reader.feed(count)
    return messages


def plain(messages):
    return [[bytes(frame) for frame in frames] for frames, _ in messages]


def passed(sent, write_limits, read_limits):
    """What arrives of `sent`, a list of (frames, number of descriptors), through a socket.

    Each message is (its frames, the files behind its descriptors). A descriptor is the reading end
    of a pipe of its own, so that no two are one file.
    """
    arrived, files = [], []
    reader, queue = FrameReader(), SendQueue()
    queue.put([GREETED])
    with pair() as (ours, theirs), ExitStack() as stack:
        stack.callback(reader.close)
        stack.callback(queue.close)
        for frames, count in sent:
            fds = []
            for _ in range(count):
                out, into = os.pipe()
                os.close(into)
                fds.append(out)
            files.append([os.fstat(fd).st_ino for fd in fds])
            queue.put(message_pieces(frames, count), fds)
            close_fds(fds)
        writes, reads = iter(write_limits), iter(read_limits)
        while queue or len(arrived) < len(sent):
            try:
                if queue:
                    queue.write(ours, next(writes, SLICE_BYTES))
            except BlockingIOError:
                pass
            try:
                messages = reader.receive_with_fds(theirs, next(reads, SLICE_BYTES))
            except BlockingIOError:
                if not queue:
                    break
                continue
            for frames, fds in messages:
                arrived.append(([bytes(f) for f in frames], [os.fstat(f).st_ino for f in fds]))
                close_fds(fds)
    return arrived, [(frames, inodes) for (frames, _), inodes in zip(sent, files, strict=True)]


@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(1, 40_000), max_size=30))
@settings(max_examples=60, deadline=None)
def test_messages_arrive_whole_and_in_order_however_they_are_cut(sent, steps):
    reader, sent = FrameReader(), [built(sizes) for sizes in sent]
    assert plain(fed(reader, wire(*sent), steps)) == sent
    assert reader.peer == "me"


@given(st.lists(FRAMES, min_size=1, max_size=3))
@settings(max_examples=10, deadline=None)
def test_messages_arrive_byte_by_byte(sent):
    sent = [built(min(size, 40_000) for size in sizes[:2]) for sizes in sent]
    assert plain(fed(FrameReader(), wire(*sent), 1)) == sent


@given(
    st.lists(st.tuples(FRAMES, st.integers(0, 3)), max_size=5),
    st.lists(st.integers(1, 50_000), max_size=20),
    st.lists(st.integers(1, 50_000), max_size=20),
)
@settings(max_examples=40, deadline=None)
def test_descriptors_arrive_with_their_message_and_none_is_left_open(sent, writes, reads):
    sent = [(built(sizes), count) for sizes, count in sent]
    with nothing_left_open():
        arrived, expected = passed(sent, writes, reads)
    assert arrived == expected


SAMPLE = [
    ([b"a"], 2),
    ([b"head", bytes(50_000), bytes(60_000), b""], 1),
    ([b"b" * 100], 0),
    ([b""], 0),
    ([b"", b""], 0),
    ([b"c", bytes(300_000)], 3),
]


STEPS = [7, 10, 20, 3, 30_000]


def test_the_sample_of_the_mutations_arrives():
    arrived, expected = passed(SAMPLE, STEPS, [5, 100, 70])
    assert arrived == expected


def _keeps_what_is_left(self):
    self._start = self._end = 0


def _forgets_partial_writes(self, sent):
    while sent:
        piece, fds = self._pieces.popleft()
        close_fds(fds)
        sent -= min(sent, piece.nbytes)


def _sends_descriptors_late(self, pieces, fds=()):
    own = framing._duplicates(fds)
    views = [memoryview(piece) for piece in pieces]
    self._pieces.extend((view, ()) for view in views[:-1])
    self._pieces.append((views[-1][:-1], ()))
    self._pieces.append((views[-1][-1:], own))


@pytest.mark.parametrize(
    ("where", "name", "mutation"),
    [
        (FrameReader, "_compact", _keeps_what_is_left),
        (SendQueue, "_drop", _forgets_partial_writes),
        (SendQueue, "put", _sends_descriptors_late),
    ],
)
def test_a_mutation_is_found(where, name, mutation, monkeypatch):
    monkeypatch.setattr(where, name, mutation)
    try:
        arrived, expected = passed(SAMPLE, STEPS, [5, 100, 70])
    except ProtocolError:
        return
    assert arrived != expected


# --- copies --------------------------------------------------------------------------------------


def test_long_frames_are_sent_from_where_they_are():
    frame = memoryview(bytearray(70_000))
    _, piece = message_pieces([b"head", frame])
    assert piece.obj is frame.obj


def test_short_frames_are_one_piece():
    assert len(message_pieces([b"head", bytes(100), bytes(4000)])) == 1


def test_a_long_frame_is_received_into_one_buffer_of_its_size():
    [(frames, _)] = fed(FrameReader(), wire([b"head", bytes(100_000), b"tail"]), 30_000)
    assert isinstance(frames[0], bytes)
    assert frames[1].obj.nbytes == frames[1].nbytes == 100_000
    assert frames[1].readonly


def test_an_event_loop_reads_and_writes_a_slice_at_once():
    reader = FrameReader()
    data = wire([b"head", bytes(3 * SLICE_BYTES)])
    assert fed(reader, data[:-SLICE_BYTES]) == []
    assert len(reader.buffer()) <= SLICE_BYTES

    class Endless:
        largest = 0

        def sendmsg(self, pieces, ancillary, flags):
            size = sum(map(len, pieces))
            self.largest = max(self.largest, size)
            return size

    queue, link = SendQueue(), Endless()
    queue.put(message_pieces([b"head", bytes(10_000_000), *[bytes(5000)] * 500]))
    while queue:
        queue.write(link)
    assert link.largest == SLICE_BYTES


# --- malformed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "no process of LookOnce"),
        (b"L0", "no process of LookOnce"),
        (GREETING.pack(MAGIC, 2, 0), "version 2"),
        (GREETING.pack(MAGIC, 1, 65_535), "name of 65535"),
        (GREETED + HEADER.pack(3, 0, 0, MARK + 1) + b"abc", "mark"),
        (GREETED + HEADER.pack(1 << 63, 0, 0, MARK), "message of"),
        (GREETED + HEADER.pack(1, MAX_FRAMES + 1, 0, MARK), "message of"),
        (GREETED + HEADER.pack(1, 1_000_000, 0, MARK), "message of"),  # its reader would stall
        (GREETED + HEADER.pack(0, 1, 0, MARK) + b"\xff" * 8, "frame of"),
        (GREETED + HEADER.pack(3, 0, 1, MARK) + b"abc", "1 descriptors declared, 0"),
        (GREETED + HEADER.pack(3, 0, 65_535, MARK) + b"abc", "descriptors declared"),
    ],
)
@pytest.mark.parametrize("step", [1, SCRATCH_BYTES])
def test_malformed_bytes_are_refused(data, words, step):
    with pytest.raises(ProtocolError, match=words):
        fed(FrameReader(), data, step)


def test_a_frame_that_there_is_no_memory_for_is_an_error_not_a_crash(monkeypatch):
    def none_left(size, dtype):
        raise MemoryError

    monkeypatch.setattr(framing.np, "empty", none_left)
    with pytest.raises(OSError, match="no memory"):
        fed(FrameReader(), GREETED + HEADER.pack(MAX_FRAME_BYTES, 0, 0, MARK))


@given(st.binary(max_size=300), st.integers(1, 100))
def test_noise_is_refused_or_waited_out(noise, step):
    for data in (noise, GREETED + noise):
        reader = FrameReader()
        try:
            fed(reader, data, step)
        except (ProtocolError, OSError):
            continue
        assert len(reader.buffer()) > 0


def test_a_stream_cut_short_is_a_lost_connection():
    data = wire([b"head", bytes(60_000)])
    for length in (0, 3, GREETING.size, 20, 60, 50_000):
        reader = FrameReader()
        assert fed(reader, data[:length]) == []
        with pytest.raises(ConnectionResetError):
            reader.feed(0)


def send_with(link, data, *fds):
    socket.send_fds(link, [data], fds)


HEAD = GREETED + HEADER.pack(6, 0, 2, MARK)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(HEAD + b"abcdef", 1)], "2 descriptors declared, 1"),
        ([(HEAD + b"abcdef", 3)], "no message declares"),
        ([(HEAD, 2), (b"abcdef", 1)], "no message declares"),
        ([(HEAD, 2), (b"abc", 1)], "no message declares"),
        ([(GREETED, 1), (HEADER.pack(1, 0, 0, MARK) + b"x", 0)], "no message declares"),
        ([(wire([b"x"]), 1)], "no message declares"),
        ([(wire([b"x", bytes(90_000)])[:50_000], 0), (bytes(100), 1)], "no message declares"),
        ([(GREETED[:4], 200), (GREETED[4:8], 200)], "400 descriptors"),
        # The message before the malformed one is given up with it.
        ([(HEAD + b"abcdef" + HEADER.pack(1, 0, 0, 0), 2)], "mark"),
    ],
)
def test_descriptors_that_do_not_agree_are_refused_and_closed(parts, words):
    with nothing_left_open(), pair() as (ours, theirs):
        reader = FrameReader()
        with pytest.raises(ProtocolError, match=words):  # noqa: PT012 - any part may be the one
            for data, count in parts:
                send_with(ours, data, *[ours.fileno()] * count)
                for _, fds in reader.receive_with_fds(theirs):
                    close_fds(fds)
        reader.close()


def test_descriptors_are_refused_where_none_are_expected():
    with nothing_left_open(), pair() as (ours, theirs):
        reader = FrameReader()
        send_with(ours, HEAD + b"abcdef", 0, 0)
        with pytest.raises(ProtocolError, match="2 descriptors declared, 0"):
            reader.receive(theirs)
        reader.close()


def test_descriptors_that_this_process_has_no_room_for_are_missing_and_the_next_ones_come():
    with nothing_left_open(), pair() as (ours, theirs):
        reader = FrameReader()
        send_with(ours, HEAD + b"abcdef", 0, 0)
        free = os.dup(0)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
        try:
            assert reader.receive_with_fds(theirs) == [([b"abcdef"], ())]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        send_with(ours, HEAD[len(GREETED) :] + b"abcdef", 0, 0)
        [(_, fds)] = reader.receive_with_fds(theirs)
        assert len(fds) == 2
        close_fds(fds)


def test_received_descriptors_are_not_inherited():
    with pair() as (ours, theirs):
        send_with(ours, HEAD + b"abcdef", 0, 1)
        [(_, fds)] = FrameReader().receive_with_fds(theirs)
        assert not any(os.get_inheritable(fd) for fd in fds)
        close_fds(fds)


# --- the blocking flavour ------------------------------------------------------------------------


@contextmanager
def message_sockets(**theirs_options):
    ours, theirs = socket.socketpair()
    with (
        closing(MessageSocket(ours)) as one,
        closing(MessageSocket(theirs, **theirs_options)) as other,
    ):
        one.settimeout(PATIENCE)
        other.settimeout(PATIENCE)
        yield one, other


def test_large_messages_pass_both_ways_and_descriptors_one_way():
    frames = [b"head", os.urandom(3_000_000), b"", os.urandom(50_000)]
    with nothing_left_open(), message_sockets(takes_fds=True) as (one, other):
        out, into = os.pipe()

        def answer():
            got, fds = other.receive()
            other.send(got)
            os.write(fds[0], b"through the pipe")
            close_fds(fds)

        thread = threading.Thread(target=answer)
        thread.start()
        one.send(frames, [into])
        got, fds = one.receive()
        thread.join()
        assert [bytes(frame) for frame in got] == frames
        assert not fds
        assert os.read(out, 100) == b"through the pipe"
        close_fds([out, into])


def test_descriptors_to_an_end_that_takes_none_are_malformed():
    with nothing_left_open(), message_sockets() as (one, other):
        one.send([b"x"], [0])
        with pytest.raises(ProtocolError, match="descriptors"):
            other.receive()


def test_silence_and_a_reader_that_is_stuck_are_timeouts():
    with message_sockets() as (one, _):
        one.settimeout(0.02)
        with pytest.raises(TimeoutError):
            one.receive()
        with pytest.raises(TimeoutError):
            one.send([bytes(5_000_000)])


def test_what_a_stuck_reader_does_not_take_is_not_waited_for_and_comes_later():
    with message_sockets() as (one, other):
        one.send([bytes(5_000_000)], wait=False)
        one.send([b"second"], wait=False)
        thread = threading.Thread(target=one.send, args=([b"third"],))
        thread.start()
        frames = [other.receive()[0] for _ in range(3)]
        thread.join()
        assert [len(frame) for (frame,) in frames] == [5_000_000, 6, 5]


def test_a_peer_that_is_gone_is_a_lost_connection():
    with message_sockets() as (one, other):
        other.close()
        with pytest.raises(ConnectionError):
            one.receive()
        with pytest.raises(ConnectionError):
            one.send([b"x"])


def test_messages_that_nobody_took_leave_no_descriptor_open():
    with nothing_left_open(), message_sockets(takes_fds=True) as (one, other):
        for _ in range(3):
            one.send([b"x"], [0, 1])
        close_fds(other.receive()[1])


def test_another_user_is_refused():
    with pair() as (ours, _):
        require_same_user(peer_uid(ours))
    require_same_user(None)
    with pytest.raises(ProtocolError, match="belongs to user"):
        require_same_user(os.geteuid() + 1)


def test_a_message_beyond_the_receivers_limit_ends_the_connection():
    ours, theirs = socket.socketpair()
    limited, sender = MessageSocket(ours, max_message_bytes=100_000), MessageSocket(theirs)
    sender.send([b"x", bytes(60_000)])
    assert [len(frame) for frame in limited.receive()[0]] == [1, 60_000]
    sender.send([b"x", bytes(60_000), bytes(60_000)])
    with pytest.raises(ProtocolError, match="120001 bytes"):
        limited.receive()
    limited.close()
    sender.close()
