"""A worker that does what its job's bytes say: `crash`, `hang`, `nonsense`, or answer who it is."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.render.media.processing import Processed
from lookonce.render.media.worker import (
    HEADER_BYTES,
    REQUESTS,
    ConfigureWorker,
    JobRequest,
    LinkClosedError,
    WorkerReady,
    map_memory,
    receive,
    send,
    send_error,
    send_processed,
)
from lookonce.types.media import Array, Expansion, ProcessedItem

NONSENSE = (1).to_bytes(HEADER_BYTES, "little") + b"\xc1"
"""A frame that holds no msgpack."""


def work(link: socket.socket, job: JobRequest, data: bytes) -> None:
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == b"hang":
        time.sleep(1000)
    if data == b"nonsense":
        link.sendall(NONSENSE)
        return
    if data == b"refuse":
        send_error(link, UnprocessableMediaError("refused"))
        return
    if data.startswith(b"wait "):
        while not os.path.exists(data[5:]):
            time.sleep(0.001)
    pid = os.getpid().to_bytes(8, "little")
    arrays = {
        "data": Array("uint8", (len(data),), data),
        "nothing": Array("float32", (0, 3), b""),
        "pid": Array("int64", (1,), pid),
    }
    item = ProcessedItem(job.modality, arrays, Expansion(((7, 3),), 7))
    send_processed(link, Processed(item, 1.5, 2.5))


def main() -> None:
    with socket.socket(fileno=int(sys.argv[-1])) as link:
        try:
            configure, _ = receive(link, REQUESTS)
            assert isinstance(configure, ConfigureWorker)
            if configure.settings.folder == "bad":
                send_error(link, ModelLoadError("bad folder"))
                return
            if configure.settings.folder == "dead":
                return
            if configure.settings.folder == "nonsense":
                link.sendall(NONSENSE)
            if configure.settings.folder == "mute":
                time.sleep(1000)
            send(link, WorkerReady())
            while True:
                job, fd = receive(link, REQUESTS)
                assert isinstance(job, JobRequest)
                work(link, job, bytes(map_memory(fd, job.num_bytes)))
        except LinkClosedError:
            return


if __name__ == "__main__":
    main()
