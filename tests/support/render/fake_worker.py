"""A worker that does what its job's bytes say: `crash`, `hang`, `nonsense`, or answer who it is."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing

from lookonce.errors import ModelLoadError, UnprocessableMediaError
from lookonce.ipc.framing import MessageSocket
from lookonce.render.media.processing import Processed
from lookonce.render.media.worker import (
    ConfigureWorker,
    JobDone,
    JobRequest,
    LinkClosedError,
    WorkerReady,
    pool_socket,
    receive,
    request_decoder,
    send,
    send_error,
)
from lookonce.types.media import Array, Expansion, ProcessedItem

NONSENSE = [b"\xc1"]
"""A frame that holds no msgpack."""


def work(link: MessageSocket, job: JobRequest, data: bytes) -> None:
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == b"hang":
        time.sleep(1000)
    if data == b"nonsense":
        link.send(NONSENSE)
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
    send(link, JobDone(Processed(item, 1.5, 2.5)))


def main() -> None:
    with closing(pool_socket()) as link:
        requests = request_decoder()
        try:
            configure, _ = receive(link, requests)
            assert isinstance(configure, ConfigureWorker)
            if configure.settings.folder == "bad":
                send_error(link, ModelLoadError("bad folder"))
                return
            if configure.settings.folder == "dead":
                return
            if configure.settings.folder == "nonsense":
                link.send(NONSENSE)
            if configure.settings.folder == "mute":
                time.sleep(1000)
            send(link, WorkerReady())
            while True:
                job, _ = receive(link, requests)
                assert isinstance(job, JobRequest)
                work(link, job, bytes(job.data.data))
        except LinkClosedError:
            return


if __name__ == "__main__":
    main()
