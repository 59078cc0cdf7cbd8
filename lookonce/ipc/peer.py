"""Who is at the other end of a unix socket."""

from __future__ import annotations

import os
import socket
import struct

from lookonce.errors import ProtocolError


def peer_uid(link: socket.socket) -> int | None:
    """The user of the process at the other end; None where the system does not say.

    At the connecting end: of the process that listens.
    """
    found = _peer(link)
    return None if found is None else found[1]


def peer_pid(link: socket.socket) -> int | None:
    """The process at the other end, or that has made the pair; None where the system is silent."""
    found = _peer(link)
    return None if found is None else found[0]


def require_same_user(uid: int | None) -> None:
    """Raises `ProtocolError` for the `peer_uid` of another user's process."""
    if uid is not None and uid != os.geteuid():
        raise ProtocolError(f"the peer belongs to user {uid}, not to {os.geteuid()}")


def _peer(link: socket.socket) -> tuple[int, int] | None:
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, option, size))
    return int(pid), int(uid)
