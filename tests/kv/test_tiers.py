"""What every tier keeps to: host, disk and a real Valkey, one contract."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from blake3 import blake3

from lookonce.config import Options, resolve
from lookonce.errors import ConfigError
from lookonce.kv.disk import DiskTier
from lookonce.kv.host import HostTier
from lookonce.kv.lmcache import LMCacheTier
from lookonce.kv.objects import HEADER_BYTES, ObjectFormat
from lookonce.kv.tier import KVTier, TierError
from lookonce.kv.valkey import ValkeyTier
from lookonce.types.kv import TierSpec
from tests.support.kv.tiers import LAYOUT, NAMESPACE, OBJECTS, SIZE, key, payload, read
from tests.support.kv_servers import LMCacheServer, ValkeyServer, needs_lmcache

Opener = Callable[[ObjectFormat], KVTier]


@pytest.fixture(
    params=[
        "host",
        "disk",
        "valkey-tcp",
        "valkey-unix",
        pytest.param("lmcache", marks=needs_lmcache),
    ]
)
def opener(request: pytest.FixtureRequest, tmp_path: Path, valkey: ValkeyServer) -> Opener:
    def open_tier(objects: ObjectFormat) -> KVTier:
        match request.param:
            case "host":
                return HostTier(objects, 100 * 2048)
            case "disk":
                return DiskTier(objects, str(tmp_path / "kv"), 1 << 20)
            case "lmcache":
                server: LMCacheServer = request.getfixturevalue("lmcache")
                return LMCacheTier(renamed(objects, request.node.name), server.address)
            case "valkey-tcp":
                return ValkeyTier(objects, TierSpec("valkey", host="127.0.0.1", port=valkey.port))
            case _:
                return ValkeyTier(objects, TierSpec("valkey", path=valkey.socket))

    return open_tier


def renamed(objects: ObjectFormat, test: str) -> ObjectFormat:
    """Every test on a server of all tests has namespaces of its own."""
    return ObjectFormat(blake3(test.encode() + objects.namespace).digest(), LAYOUT)


@pytest.fixture
def tier(opener: Opener) -> Iterator[KVTier]:
    opened = opener(OBJECTS)
    yield opened
    opened.close()


def fill(tier: KVTier, *numbers: int) -> None:
    tier.write([key(n) for n in numbers], [payload(n) for n in numbers])


def test_what_is_written_is_read_back(tier: KVTier) -> None:
    fill(tier, *range(20))
    outcome, blocks = read(tier, [key(n) for n in range(20)])
    assert (outcome.num_blocks, outcome.reason) == (20, None)
    assert blocks == [bytes(payload(n)) for n in range(20)]


def test_a_lookup_says_which_are_held(tier: KVTier) -> None:
    fill(tier, 1, 3)
    assert tier.lease([key(n) for n in range(5)]) == [False, True, False, True, False]
    tier.release([key(1), key(3)])
    assert tier.lease([]) == []


def test_reading_ends_at_the_first_block_that_is_gone(tier: KVTier) -> None:
    fill(tier, 1, 2, 4)
    outcome, blocks = read(tier, [key(n) for n in (1, 2, 3, 4)])
    assert (outcome.num_blocks, outcome.reason) == (2, "missing")
    assert blocks == [bytes(payload(1)), bytes(payload(2))]


def test_what_is_held_is_not_written_again(tier: KVTier) -> None:
    assert tier.write([key(1)], [payload(1)]) == 1
    assert tier.write([key(1), key(2)], [payload(1), payload(2)]) == 1


def test_another_namespace_sees_nothing(tier: KVTier, opener: Opener) -> None:
    fill(tier, 1)
    if isinstance(tier, HostTier):
        pytest.skip("host memory is one engine's own")
    other = opener(ObjectFormat(bytes(32), LAYOUT))
    assert other.lease([key(1)]) == [False]
    other.close()


# --- host -----------------------------------------------------------------------------------------


def test_a_full_slab_drops_the_least_recently_used_and_keeps_what_is_leased() -> None:
    tier = HostTier(OBJECTS, 3 * OBJECTS.object_bytes)
    fill(tier, 1, 2, 3)
    assert tier.lease([key(1)]) == [True]
    fill(tier, 4)
    assert tier.lease([key(n) for n in (1, 2, 3, 4)]) == [True, False, True, True]
    tier.check_integrity()


def test_memory_that_decayed_is_a_miss_and_is_let_go() -> None:
    tier = HostTier(OBJECTS, 3 * OBJECTS.object_bytes)
    fill(tier, 1)
    tier._slab[HEADER_BYTES + 5] ^= 4
    outcome, _ = read(tier, [key(1)])
    assert outcome.reason == "corrupt"
    assert tier.lease([key(1)]) == [False]
    tier.check_integrity()


def test_a_slab_must_hold_a_block_and_fit_the_machine() -> None:
    with pytest.raises(ConfigError, match="one block"):
        HostTier(OBJECTS, 10)
    with pytest.raises(ConfigError, match="memory"):
        HostTier(OBJECTS, 1 << 50)


# --- disk -----------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/??/*.kv"))


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    first = DiskTier(OBJECTS, str(tmp_path), 1 << 20)
    fill(first, 1, 2)
    first.close()
    again = DiskTier(OBJECTS, str(tmp_path), 1 << 20)
    again.wait_scanned()
    assert again.held_bytes == 2 * OBJECTS.object_bytes
    assert read(again, [key(1), key(2)])[0].num_blocks == 2


def test_the_byte_limit_drops_the_least_recently_used_even_after_a_restart(tmp_path: Path) -> None:
    first = DiskTier(OBJECTS, str(tmp_path), 1 << 20)
    fill(first, 1, 2, 3)
    first.wait_scanned()
    again = DiskTier(OBJECTS, str(tmp_path), 2 * OBJECTS.object_bytes)
    again.wait_scanned()
    assert len(files(tmp_path)) == 2
    fill(again, 4, 5)
    assert again.held_bytes == 2 * OBJECTS.object_bytes
    assert again.lease([key(n) for n in (4, 5)]) == [True, True]


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "empty"])
def test_a_damaged_file_is_deleted_and_a_miss(tmp_path: Path, damage: str) -> None:
    tier = DiskTier(OBJECTS, str(tmp_path), 1 << 20)
    fill(tier, 1)
    (path,) = files(tmp_path)
    stored = bytearray(path.read_bytes())
    stored[200] ^= 1
    path.write_bytes(
        {"flip": stored, "truncate": stored[:-1], "grow": stored + b"x", "empty": b""}[damage]
    )
    assert read(tier, [key(1)])[0].reason == "corrupt"
    assert files(tmp_path) == []
    assert tier.held_bytes == 0
    fill(tier, 1)
    assert read(tier, [key(1)])[0].num_blocks == 1


def test_a_file_under_another_blocks_name_is_not_taken_for_it(tmp_path: Path) -> None:
    tier = DiskTier(OBJECTS, str(tmp_path), 1 << 20)
    fill(tier, 1, 2)
    first, second = files(tmp_path)
    second.write_bytes(first.read_bytes())
    assert read(tier, [key(2)])[0].reason == "corrupt"


def test_a_folder_that_vanished_is_a_fault_and_then_works_again(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier = DiskTier(OBJECTS, str(folder), 1 << 20)
    tier.wait_scanned()
    (folder / NAMESPACE.hex()[:16]).rmdir()
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.raises(TierError):
        fill(tier, 1)
    folder.unlink()
    fill(tier, 1)
    assert read(tier, [key(1)])[0].num_blocks == 1


def test_abandoned_drafts_are_cleared_and_foreign_files_left_alone(tmp_path: Path) -> None:
    tier = DiskTier(OBJECTS, str(tmp_path), 1 << 20)
    fill(tier, 1)
    (path,) = files(tmp_path)
    draft, foreign = path.with_name(path.name + ".1-2-3.tmp"), tmp_path / "notes.txt"
    for left in (draft, foreign):
        left.write_bytes(b"x")
        os.utime(left, (0, 0))
    DiskTier(OBJECTS, str(tmp_path), 1 << 20).wait_scanned()
    assert not draft.exists()
    assert foreign.exists()
    assert path.exists()


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    one, two = (DiskTier(OBJECTS, str(tmp_path), 1 << 20) for _ in range(2))
    fill(one, 1)
    assert two.lease([key(1)]) == [True]
    assert read(two, [key(1)])[0].num_blocks == 1


def test_a_folder_that_cannot_be_made_is_a_mistake_in_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk"):
        DiskTier(OBJECTS, str(tmp_path / "file" / "kv"), 1 << 20)


# --- valkey ---------------------------------------------------------------------------------------


@pytest.fixture
def shared(valkey: ValkeyServer) -> Iterator[ValkeyTier]:
    tier = ValkeyTier(OBJECTS, TierSpec("valkey", path=valkey.socket), timeout=1.0)
    yield tier
    tier.close()


def test_a_corrupt_value_is_deleted_and_a_miss(valkey: ValkeyServer, shared: ValkeyTier) -> None:
    tier = shared
    fill(tier, 1, 2)
    name = b"lookonce:kv:" + NAMESPACE + key(1)
    stored = valkey.call(b"GET", name)
    assert isinstance(stored, bytes)
    for damaged in (stored[:-1], stored[:40] + b"\xff" + stored[41:], b"", stored + b"x" * 70000):
        valkey.call(b"SET", name, damaged)
        assert read(tier, [key(1), key(2)])[0].reason == "corrupt"
        assert valkey.call(b"EXISTS", name) == 0
    assert read(tier, [key(2)])[0].num_blocks == 1, "the connection is still in step"


def test_a_server_that_hangs_costs_one_deadline(valkey: ValkeyServer, shared: ValkeyTier) -> None:
    tier = shared
    fill(tier, 1)
    valkey.pause()
    assert read(tier, [key(1)])[0].reason == "timeout"
    with pytest.raises(TierError) as caught:
        tier.lease([key(1)])
    assert caught.value.reason == "timeout"
    valkey.resume()
    assert read(tier, [key(1)])[0].num_blocks == 1


def test_a_server_that_was_killed_and_came_back_empty_is_a_miss(
    valkey: ValkeyServer, shared: ValkeyTier
) -> None:
    tier = shared
    fill(tier, 1)
    valkey.kill()
    assert read(tier, [key(1)])[0].reason == "connection"
    assert read(tier, [key(1)])[0].reason == "connection"
    valkey.start()
    assert read(tier, [key(1)])[0].reason == "missing"
    fill(tier, 1)
    assert read(tier, [key(1)])[0].num_blocks == 1


def test_a_server_that_refuses_writes_is_a_fault_of_its_own(
    valkey: ValkeyServer, shared: ValkeyTier
) -> None:
    tier = shared
    valkey.call(b"CONFIG", b"SET", b"maxmemory", b"1")
    with pytest.raises(TierError) as caught:
        fill(tier, 1)
    assert caught.value.reason == "io"


def test_something_else_on_the_port_is_no_valkey() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        spec = TierSpec("valkey", host="127.0.0.1", port=server.getsockname()[1])
        with pytest.raises(TierError) as caught:
            ValkeyTier(OBJECTS, spec).lease([key(1)])
        thread.join()
        assert caught.value.reason == "connection"


# --- lmcache --------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="LMCache is installed")
def test_without_the_library_the_extra_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"lookonce\[lmcache\]"):
        resolve(Options(kv_tier=("lmcache://127.0.0.1:5555",)))
    with pytest.raises(ConfigError, match=r"lookonce\[lmcache\]"):
        LMCacheTier(OBJECTS, "127.0.0.1:5555")


def test_payload_size_is_part_of_the_contract(tier: KVTier) -> None:
    with pytest.raises((ValueError, TierError)):
        tier.write([key(1)], [memoryview(bytes(SIZE - 1))])
    tier.close()
