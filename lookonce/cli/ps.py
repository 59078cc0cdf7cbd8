"""`lookonce ps`: this user's servers on this machine, as Linux lists processes and sockets."""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from lookonce.engine.supervisor.socket_folder import PREFIX
from lookonce.errors import ConfigError

PROC = Path("/proc")
LISTENING = "0A"
ACCEPTS = 0x10000
SECONDS = 2.0
NO_ANSWER = "no answer"
COMMANDS = ("serve", "render", "fleet")
MODULE = "lookonce.cli.main"
ENGINE_SOCKET = "/http"
"""What a fleet's engine listens on, in the folder of `fleet.deploy.Engine`."""


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    command: str
    url: str
    model: str
    """"?" where the server does not tell."""
    status: str
    """What /ready says; "no answer" while it starts or ends."""
    seconds: float
    """Since its start."""
    memory_bytes: int
    """Of the supervisor and all its processes; shared pages count once."""


def print_servers(api_key: str | None, *, as_json: bool) -> None:
    """Raises `ConfigError` where there is no Linux."""
    if sys.platform != "linux":
        raise ConfigError("ps: only Linux tells which processes listen where")
    servers = list(find_servers(api_key))
    if as_json:
        print(json.dumps([asdict(server) for server in servers], indent=1))
        return
    if not servers:
        print("no server of this user runs here", file=sys.stderr)
        return
    width = max(28, *(len(each.url) for each in servers))
    print(f"{'PID':>7}  {'URL':{width}}  {'MODEL':24}  {'STATUS':12}  {'UP':>7}  MEMORY")
    for each in servers:
        untold = "? (needs --api-key)" if each.status == "ready" else "?"
        model = untold if each.model == "?" else each.model
        print(
            f"{each.pid:7}  {each.url:{width}}  {model:24}  {each.status:12}  "
            f"{_age(each.seconds):>7}  {each.memory_bytes / 1e9:.2f} GB"
        )


def find_servers(api_key: str | None = None) -> Iterator[Server]:
    for pid in sorted(_own_processes()):
        try:
            command = command_of(_arguments(pid))
            if command is None:
                continue
            sockets = _sockets(pid)
            urls = [*_tcp_urls(pid, sockets), *_unix_urls(pid, sockets)]
            age, memory = _seconds(pid), _memory(pid)
        except OSError:
            continue  # it has ended
        url, status, model = "", "starting", "?"
        for each in urls if command == "fleet" else urls[:1]:  # a fleet has ports of Ray, too
            url, status, model = _ask(each, api_key)
            if status != NO_ANSWER:
                break
        yield Server(pid, command, url, model, status, age, memory)


def command_of(arguments: list[str]) -> str | None:
    """ "serve", "render" or "fleet" for the arguments of such a process; None for all others."""
    for index, word in enumerate(arguments[:-1]):
        if index > 3:
            break
        is_lookonce = Path(word).name == "lookonce" or (
            word == MODULE and index and arguments[index - 1] == "-m"
        )
        if is_lookonce and arguments[index + 1] in COMMANDS:
            return arguments[index + 1]
    return None


def listening_tcp(table: str) -> dict[str, str]:
    """Of /proc/net/tcp or tcp6: inode of a listening socket → its address, as in a URL."""
    found = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == LISTENING:
            found[fields[9]] = _address(fields[1])
    return found


def _address(text: str) -> str:
    """Linux writes an IP address as words of 32 bits in the machine's byte order, in hex."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[at : at + 8]) for at in range(0, len(digits), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    if len(raw) == 4:
        host = socket.inet_ntop(socket.AF_INET, raw)
        return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{int(port, 16)}"
    host = socket.inet_ntop(socket.AF_INET6, raw)
    return f"[{'::1' if host == '::' else host}]:{int(port, 16)}"


def _own_processes() -> Iterator[int]:
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            try:
                if folder.stat().st_uid == os.getuid():
                    yield int(folder.name)
            except OSError:
                continue


def _arguments(pid: int) -> list[str]:
    raw = (PROC / str(pid) / "cmdline").read_bytes()
    return os.fsdecode(raw).rstrip("\0").split("\0")


def _sockets(pid: int) -> set[str]:
    """Inodes of all sockets that the process holds."""
    found = set()
    for link in (PROC / str(pid) / "fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _tcp_urls(pid: int, sockets: set[str]) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        table = PROC / str(pid) / "net" / name
        if table.exists():
            for inode, address in listening_tcp(table.read_text()).items():
                if inode in sockets:
                    yield f"http://{address}"


def _unix_urls(pid: int, sockets: set[str]) -> Iterator[str]:
    """Sockets of `--uds`, engines of a local fleet too; others in the server's own folder are for
    its processes."""
    for line in (PROC / str(pid) / "net" / "unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) < 8 or fields[6] not in sockets or not int(fields[3], 16) & ACCEPTS:
            continue
        if not Path(fields[7]).parent.name.startswith(PREFIX) or fields[7].endswith(ENGINE_SOCKET):
            yield f"unix:{fields[7]}"


def _ask(url: str, api_key: str | None) -> tuple[str, str, str]:
    """The URL, with https where the server speaks it, its status and its model."""
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # our own server, by its address
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    uds = url.removeprefix("unix:") if url.startswith("unix:") else None
    base = "http://localhost" if uds else url
    for each in (base, base.replace("http:", "https:", 1)):
        transport = httpx.HTTPTransport(uds=uds, verify=unverified)
        try:
            with httpx.Client(
                transport=transport, base_url=each, headers=headers, timeout=SECONDS
            ) as client:
                status = str(client.get("/ready").json()["status"])
                listed = client.get("/v1/models")
            model = _models(listed.json()) if listed.status_code == 200 else "?"
        except (httpx.HTTPError, ValueError, LookupError, TypeError, UnicodeEncodeError):
            continue
        return url if uds else each, status, model
    return url, NO_ANSWER, "?"


def _models(listed: Any) -> str:
    """Without LoRA adapters."""
    return ", ".join(str(each["id"]) for each in listed["data"] if each.get("parent") is None)


def _seconds(pid: int) -> float:
    ticks = int(_stat(pid)[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: the second, a name, may have spaces."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _memory(pid: int) -> int:
    """Proportional set sizes of the process and of all that it has started."""
    parents = {}
    for each in _own_processes():
        try:
            parents[each] = int(_stat(each)[1])
        except (OSError, ValueError):
            continue
    return sum(_pss(each) for each in _with_descendants(pid, parents))


def _with_descendants(pid: int, parents: dict[int, int]) -> Iterable[int]:
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _pss(pid: int) -> int:
    try:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has ended, or is of another kind
    return 0


def _age(seconds: float) -> str:
    """12s, 5m, 3h, 2d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"
