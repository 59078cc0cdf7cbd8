"""ZMTP: whatever is said arrives, however the bytes are cut; and libzmq understands it."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from lookonce.errors import ProtocolError
from lookonce.ipc.zmq_client_link import GREETING, Reader, hello, message

PATIENCE = 20.0
FRAMES = st.lists(st.binary(max_size=600), min_size=1, max_size=4)


def fed(reader: Reader, data: bytes, cuts: list[int]) -> list[list[bytes]]:
    """What the reader makes of `data`, given to it in pieces."""
    messages, start = [], 0
    for end in [*sorted(cuts), len(data)]:
        messages += [[bytes(f) for f in frames] for frames in reader.feed(data[start:end])]
        start = end
    return messages


@given(st.lists(FRAMES), st.data())
def test_messages_arrive_whole_and_in_order_however_they_are_cut(sent, data):
    stream = hello(b"me") + b"".join(bytes(p) for frames in sent for p in message(frames))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
    reader = Reader()
    assert fed(reader, stream, cuts) == sent
    assert reader.ready


def test_large_frames_are_sent_from_where_they_are():
    frame = memoryview(bytearray(70_000))
    _, head, piece = message([b"head", frame])
    assert piece.obj is frame.obj
    assert head == b"\x02" + (70_000).to_bytes(8, "big")


def test_the_first_frame_is_bytes_and_others_are_views_of_what_came():
    reader = Reader()
    [frames] = reader.feed(hello(b"me") + b"".join(map(bytes, message([b"a", b"b"]))))
    assert frames[0] == b"a"
    assert isinstance(frames[1], memoryview)
    assert frames[1].readonly


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n".ljust(64),
        GREETING[:10] + b"\x01" + GREETING[11:],
        GREETING.replace(b"NULL\0", b"PLAIN"),
    ],
)
def test_another_protocol_is_refused(greeting):
    with pytest.raises(ProtocolError, match="ZMTP 3"):
        list(Reader().feed(greeting))


def test_a_peer_that_refuses_the_connection_is_heard():
    with pytest.raises(ProtocolError, match="no such user"):
        list(Reader().feed(GREETING + b"\x04\x13\x05ERROR\x0cno such user"))


@given(st.binary(max_size=300))
def test_noise_is_refused_or_waited_out(noise):
    with suppress(ProtocolError):
        list(Reader().feed(hello(b"me") + noise))


def test_libzmq_understands_it_and_is_understood(tmp_path):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    router.bind(f"ipc://{tmp_path}/s")
    sent = [b"head", bytes(100_000), b""]
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{tmp_path}/s")
            client.settimeout(PATIENCE)
            client.sendall(hello(b"me"))
            reader, heard = Reader(), []
            while not reader.ready:
                heard += reader.feed(client.recv(9_999))
            for piece in message(sent):
                client.sendall(piece)
            assert router.recv_multipart() == [b"me", *sent]
            router.send_multipart([b"me", *sent])
            while not heard:
                heard += reader.feed(client.recv(9_999))
            assert [bytes(frame) for frame in heard[0]] == sent
    finally:
        context.destroy(linger=0)
