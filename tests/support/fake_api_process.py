"""A small stand-in for the API process: starts, serves, drains and ends as `launch` expects.

/ready   200                     /slow    an answer that takes a while
/pid     its process id          /begun   how many of those have begun
/keys    how many keys it has    /pid_and_keys    both

With a chat template named `refused` it refuses to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys

from lookonce.engine.process_io import ProgressPipe, Serving, StartFailed
from lookonce.engine.supervisor.child_process import EXIT_REFUSED
from lookonce.errors import ConfigError, error_to_wire

SLOW_SECONDS = 0.5
begun = 0
num_keys = 0


def read_line() -> None:
    global num_keys
    if line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined]
        num_keys = len(json.loads(line)["api_keys"])
    else:
        asyncio.get_running_loop().remove_reader(0)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    global begun
    path = (await reader.readline()).split()[1]
    if path == b"/slow":
        begun += 1
        await asyncio.sleep(SLOW_SECONDS)
    both = f"{os.getpid()} {num_keys}"
    told = {b"/begun": begun, b"/keys": num_keys, b"/pid_and_keys": both}
    body = str(told.get(path, os.getpid())).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body)
    await writer.drain()
    writer.close()


async def serve(listen_fd: int) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    asyncio.get_running_loop().add_reader(0, read_line)
    running: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(answer(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, sock=socket.socket(fileno=listen_fd))
    ProgressPipe(1).tell(Serving(0.0))
    await stopped.wait()
    server.close()
    await asyncio.gather(*running)


if __name__ == "__main__":
    start = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[attr-defined]
    num_keys = len(start["config"]["server"]["api_keys"])
    if start["config"]["server"]["chat_template"] == "refused":
        error = ConfigError("--chat-template refused cannot be read")
        ProgressPipe(1).tell(StartFailed(error_to_wire(error)))
        sys.exit(EXIT_REFUSED)
    asyncio.run(serve(start["listen_fd"]))
