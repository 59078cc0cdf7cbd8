"""The folder of a server's sockets goes with the last process that uses it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from lookonce.engine.supervisor.socket_folder import (
    joined_socket_folder,
    remove_abandoned_folders,
    remove_if_abandoned,
    socket_folder,
)

USE = """
import sys
from lookonce.engine.supervisor.socket_folder import joined_socket_folder, socket_folder
with {how}(sys.argv[1]):
    print("in", flush=True)
    sys.stdin.read()
"""


@contextmanager
def process(how, address):
    """Another process that uses the folder until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", USE.format(how=how), address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as running:
        try:
            assert running.stdout.readline() == b"in\n"
            yield running
        finally:
            running.kill()


def end(running):
    running.stdin.close()
    assert running.wait(30) == 0


@pytest.fixture
def address(tmp_path):
    return f"{tmp_path}/lookonce-0/engine.sock"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "lookonce-0"


def test_it_is_this_user_s_alone_and_gone_at_the_end(address, folder):
    with socket_folder(address) as made:
        assert made == folder
        assert folder.stat().st_mode & 0o777 == 0o700
        with joined_socket_folder(address):
            pass
        assert folder.exists()
    assert not folder.exists()


def test_the_last_child_removes_what_a_killed_supervisor_left(address, folder):
    with (
        process("socket_folder", address) as supervisor,
        process("joined_socket_folder", address) as first,
        process("joined_socket_folder", address) as second,
    ):
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait(30)
        end(first)
        assert folder.exists()
        assert not remove_if_abandoned(folder)
        end(second)
        assert not folder.exists()


def test_the_next_server_removes_what_killed_processes_left(address, folder, tmp_path):
    with process("socket_folder", address) as supervisor:
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait(30)
    other = f"{tmp_path}/lookonce-1/engine.sock"
    with socket_folder(other):
        assert not folder.exists()


def test_what_is_used_or_none_of_ours_stays(address, folder, tmp_path):
    foreign = tmp_path / "lookonce-foreign"
    foreign.mkdir()
    with process("socket_folder", address), socket_folder(f"{tmp_path}/lookonce-2/e"):
        remove_abandoned_folders(tmp_path)
        assert folder.exists()
        assert foreign.exists()


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "lookonce-link").symlink_to(target)
    remove_abandoned_folders(tmp_path)
    assert (target / "lock").exists()
