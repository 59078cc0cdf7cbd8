"""The supervisor over real processes: a fake engine, and a stand-in for the API process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from lookonce import launch
from lookonce.config import Options, ServerConfig, resolve
from lookonce.engine.supervisor import child_process
from lookonce.engine.supervisor.child_process import ChildProcess
from lookonce.errors import ConfigError, EngineDeadError
from lookonce.launch import Supervisor, bind, url_of

ENGINE = (sys.executable, "-m", "tests.support.engine.fake_process")
API = (sys.executable, "-m", "tests.support.fake_api_process")
PATIENCE = 60.0


def config(behaviour="serve", **server):
    plain = resolve(Options(model=behaviour))
    changed = dataclasses.replace(plain.server, port=0, **server)
    return dataclasses.replace(plain, server=changed)


class Launched:
    """A supervisor at work on this event loop."""

    def __init__(self, given, engine=ENGINE):
        self.config = given
        self.loading = []
        self._url = asyncio.get_running_loop().create_future()
        self.supervisor = Supervisor(
            given,
            on_loading=lambda done, total: self.loading.append((done, total)),
            on_ready=self._url.set_result,
            engine_command=engine,
            api_command=API,
        )
        self.running = asyncio.create_task(self.supervisor.run())

    async def url(self):
        await asyncio.wait([self._url, self.running], return_when=asyncio.FIRST_COMPLETED)
        if self.running.done():
            self.running.result()
        return self._url.result()

    async def pid(self):
        """Of an API process, once one serves."""
        async with httpx.AsyncClient() as client:
            while (answer := await client.get(await self.url() + "/pid")).status_code == 503:
                pass
            return int(answer.text)

    async def stop(self):
        self.supervisor.ask_stop()
        await self.running


def launched(scenario, given=None, **options):
    async def whole():
        server = Launched(given or config(), **options)
        try:
            async with asyncio.timeout(PATIENCE):
                await scenario(server)
        finally:
            if not server.running.done():
                async with asyncio.timeout(PATIENCE):
                    await server.stop()

    asyncio.run(whole())


async def until(condition):
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.02)


def test_it_says_where_it_serves_and_cleans_up_when_it_ends():
    async def scenario(server):
        url = await server.url()
        assert url.startswith("http://127.0.0.1:")
        assert server.loading[-1] == (2, 2)
        folder = Path(server.config.channel.address).parent
        assert folder.exists()
        await server.stop()
        assert not folder.exists()
        with pytest.raises(httpx.ConnectError):
            await server.pid()

    launched(scenario)


def test_api_processes_share_one_socket():
    async def scenario(server):
        await server.url()
        seen = set()
        while len(seen) < 2:
            seen |= set(await asyncio.gather(*(server.pid() for _ in range(8))))
        assert os.getpid() not in seen

    launched(scenario, config(api_processes=2))


def test_an_api_process_that_dies_is_restarted(caplog):
    async def scenario(server):
        first = await server.pid()
        os.kill(first, signal.SIGKILL)
        while await server.pid() == first:
            pass

    with caplog.at_level(logging.ERROR):
        launched(scenario)
    assert "API process 0 ended by signal 9; it is started again in 0.0 s" in caplog.text


def test_api_processes_that_die_many_times_in_a_row_are_restarted_every_time(caplog, monkeypatch):
    monkeypatch.setattr(launch, "MAX_API_DELAY", 0.05)

    async def scenario(server):
        for _ in range(8):
            os.kill(await server.pid(), signal.SIGKILL)
            await asyncio.sleep(0.1)
        await server.pid()

    with caplog.at_level(logging.ERROR):
        launched(scenario)
    assert caplog.text.count("API process 0 ended by signal 9") >= 5


def held_start(monkeypatch):
    """From now on API processes start only once the event is set that this returns."""
    may_start, start = asyncio.Event(), ChildProcess.start.__func__

    async def held(kind, name, *arguments, **options):
        if name.startswith("API"):
            await may_start.wait()
        return await start(kind, name, *arguments, **options)

    monkeypatch.setattr(ChildProcess, "start", classmethod(held))
    return may_start


def test_while_no_api_process_serves_clients_are_told_to_come_again(monkeypatch, caplog):
    async def scenario(server):
        first = await server.pid()
        may_start = held_start(monkeypatch)
        os.kill(first, signal.SIGKILL)
        await until(lambda: "API process 0 ended by signal 9" in caplog.text)
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            url = await server.url()
            asked = [client.get(url + "/health"), client.post(url + "/x", content=b"a" * 4_000_000)]
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.headers["connection"] == "close"
                assert answer.json()["error"]["type"] == "service_unavailable_error"
            may_start.set()
            assert await server.pid() != first

    with caplog.at_level(logging.WARNING):
        launched(scenario)
    assert caplog.text.count("requests are answered with 503") == 1


def test_while_one_api_process_serves_nobody_is_refused(monkeypatch):
    async def scenario(server):
        seen = set()
        while len(seen) < 2:
            seen |= set(await asyncio.gather(*(server.pid() for _ in range(8))))
        monkeypatch.setattr(launch, "HOLD_SECONDS", 0.1)
        may_start = held_start(monkeypatch)
        killed, other = seen
        os.kill(killed, signal.SIGKILL)
        end = asyncio.get_running_loop().time() + 2 * launch.HOLD_SECONDS
        async with httpx.AsyncClient(headers={"Connection": "close"}) as client:
            url = await server.url()
            while asyncio.get_running_loop().time() < end:
                with suppress(httpx.TransportError):  # the one that was killed
                    assert (await client.get(url + "/pid")).text == str(other)
        may_start.set()

    launched(scenario, config(api_processes=2))


def test_clients_that_send_nothing_or_leave_keep_nobody_from_an_answer(monkeypatch, caplog):
    monkeypatch.setattr(launch, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(launch, "MAX_REFUSED", 4)
    monkeypatch.setattr(launch, "REFUSAL_SECONDS", 0.3)

    async def scenario(server):
        url = await server.url()
        first = await server.pid()
        may_start = held_start(monkeypatch)
        os.kill(first, signal.SIGKILL)
        await until(lambda: "API process 0 ended by signal 9" in caplog.text)
        host, port = url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(host, port) for _ in range(12)]
        left = [await asyncio.open_connection(host, port) for _ in range(3)]
        for _, writer in left:
            writer.write(b"GET / HT")
            writer.transport.abort()
        async with httpx.AsyncClient() as client:
            while True:  # more clients than are refused at a time are disconnected
                with suppress(httpx.TransportError):
                    assert (await client.get(url + "/health")).status_code == 503
                    break
        assert [await reader.read() for reader, _ in silent] == [b""] * len(silent)
        for _, writer in silent:
            writer.close()
        may_start.set()

    launched(scenario)


def test_an_engine_that_crashes_before_it_serves_is_given_up_and_everything_ends(caplog):
    async def scenario(server):
        with pytest.raises(EngineDeadError, match="4 starts in a row have failed"):
            await server.running

    with caplog.at_level(logging.ERROR):
        launched(scenario, config("break"))
    ended = "the engine process ended with status"
    assert caplog.text.count(ended) == 3


def test_an_engine_that_crashes_again_and_again_after_it_served_is_restarted(caplog, monkeypatch):
    monkeypatch.setattr(child_process, "MAX_DELAY", 0.05)

    async def scenario(server):
        await until(lambda: caplog.text.count("the engine process ended with status 7") > 5)
        assert not server.running.done()

    with caplog.at_level(logging.ERROR):
        launched(scenario, config("crash"))


def test_what_the_engine_refuses_to_start_with_is_raised_and_nothing_is_left():
    async def scenario(server):
        with pytest.raises(ConfigError, match="at least 900"):
            await server.running

    launched(scenario, config("refuse"))


def test_what_an_api_process_refuses_to_start_with_is_raised_and_nothing_is_left():
    async def scenario(server):
        with pytest.raises(ConfigError, match="--chat-template refused"):
            await server.running

    launched(scenario, config(chat_template="refused"))


def test_running_requests_finish_when_it_is_told_to_stop():
    async def scenario(server):
        async with httpx.AsyncClient() as client:
            slow = asyncio.create_task(client.get(await server.url() + "/slow"))
            while (await client.get(await server.url() + "/begun")).text == "0":
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await slow).status_code == 200
        await server.running

    launched(scenario)


def test_told_twice_it_ends_at_once():
    async def scenario(server):
        async with httpx.AsyncClient() as client:
            slow = asyncio.create_task(client.get(await server.url() + "/slow"))
            while (await client.get(await server.url() + "/begun")).text == "0":
                pass
            server.supervisor.ask_stop()
            await asyncio.sleep(0)
            server.supervisor.ask_stop()
            with pytest.raises(httpx.TransportError):
                await slow
        await server.running

    launched(scenario)


def test_sighup_gives_all_api_processes_the_keys_of_now_and_ends_nothing(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("one\n")
    given = resolve(Options(model="serve", port=0, api_processes=2, api_key_file=str(file)))

    async def scenario(server):
        async with httpx.AsyncClient(headers={"Connection": "close"}) as client:
            url = await server.url()

            async def told():
                """What all API processes say: who answers is the kernel's choice."""
                found = {}
                while len(found) < 2:
                    answers = [client.get(url + "/pid_and_keys") for _ in range(8)]
                    with suppress(httpx.TransportError):  # of the one that was killed
                        found |= [a.text.split() for a in await asyncio.gather(*answers)]
                return found

            before = await told()
            assert {*before.values()} == {"1"}
            file.write_text("one\ntwo\n")
            os.kill(os.getpid(), signal.SIGHUP)
            while {*(await told()).values()} != {"2"}:
                pass
            file.write_text("nonsense:::\n")
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: "keys and limits stay what they were" in caplog.text)
            assert await told() == dict.fromkeys(before, "2")
            killed = next(iter(before))
            os.kill(int(killed), signal.SIGKILL)
            while killed in (now := await told()):
                pass
            assert {*now.values()} == {"2"}  # the one that was started again has them, too

    with caplog.at_level(logging.INFO):
        launched(scenario, given)


def test_a_service_manager_is_told_when_it_is_ready_reloads_and_stops(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        states: list[str] = []

        def told(state):
            with contextlib.suppress(BlockingIOError):
                while True:
                    states.append(manager.recv(4096).decode())
            return any(line.startswith(state) for line in states)

        async def scenario(server):
            url = await server.url()
            assert told("STATUS=loading")
            assert told("READY=1")
            assert f"STATUS=serving on {url}" in states[-1]
            assert "NOTIFY_SOCKET" not in os.environ
            states.clear()
            server.supervisor.reload()
            assert told("RELOADING=1\nMONOTONIC_USEC=")
            assert states[-1].startswith("READY=1")
            states.clear()
            await server.stop()
            assert told("STOPPING=1")

        launched(scenario)


def test_a_service_manager_that_has_gone_is_no_reason_to_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))

    async def scenario(server):
        await server.url()

    launched(scenario)
    assert "the service manager was not told READY=1" in caplog.text


def test_sighup_while_an_api_process_starts_reaches_it_too(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("one\n")
    given = resolve(Options(model="serve", port=0, api_key_file=str(file)))
    start = ChildProcess.start.__func__

    async def slow(kind, name, *arguments, **options):
        child = await start(kind, name, *arguments, **options)
        if name.startswith("API"):
            file.write_text("one\ntwo\n")
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
        return child

    monkeypatch.setattr(ChildProcess, "start", classmethod(slow))

    async def scenario(server):
        async with httpx.AsyncClient(headers={"Connection": "close"}) as client:
            url = await server.url()
            assert (await client.get(url + "/keys")).text == "2"

    launched(scenario, given)


def test_an_engine_that_hangs_is_killed_and_restarted(caplog):
    """This one says it serves, and that its step takes ever longer."""
    hanging = (
        "import time\n"
        'print(\'{"type": "serving", "seconds": 0}\', flush=True)\n'
        'print(\'{"type": "alive", "stalled_seconds": 999}\', flush=True)\n'
        "time.sleep(999)\n"
    )

    async def scenario(server):
        await until(lambda: caplog.text.count("the engine process ended by signal 9") == 2)

    with caplog.at_level(logging.ERROR):
        launched(scenario, engine=(sys.executable, "-c", hanging))
    assert "it is killed" in caplog.text


def test_an_address_in_use_is_one_clear_error_and_leaves_nothing():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = resolve(Options(port=port))

        async def scenario():
            await Supervisor(given).run()

        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(scenario())
    assert not Path(given.channel.address).parent.exists()


def test_it_listens_on_a_unix_socket_and_replaces_a_stale_one(tmp_path):
    path = str(tmp_path / "s")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    with bind(ServerConfig(uds=path)) as listener:
        assert url_of(listener) == f"unix:{path}"
        with pytest.raises(ConfigError, match="cannot listen"):
            bind(ServerConfig(uds=path))


def test_ipv6_addresses_are_bracketed():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with bind(ServerConfig(host="::1", port=0)) as listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_the_supervisor_imports_neither_torch_nor_transformers():
    code = "import lookonce.launch, sys; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
