"""API processes with their media workers and one engine that share slabs, in one thread.

The two halves and the memory are real, the messages pass the real codec; only the sockets are
queues. Every item has its own number written into its slab, so whoever holds a view of it sees when
the slab was written again too early.
"""

import os
from collections import deque
from pathlib import Path

import numpy as np

from lookonce.cache.slab_pool import SlabPool
from lookonce.cache.slabs import SMALLEST, SlabOwner, map_memory
from lookonce.errors import ProtocolError
from lookonce.ipc.codec import MessageEncoder, client_message_decoder
from lookonce.ipc.messages import CacheOps, KeyedItem, LeaseSlabs, SlabsLeased, UpdateCache
from lookonce.types.media import Array, Expansion, ProcessedItem

EXPANSION = Expansion(((900, 1),), 900)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def slab_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lookonce-slab")


class Item:
    """A processed item, or what is left of it: arrays whose numbers must not change."""

    def __init__(self, number, arrays):
        self.number = number
        self.arrays = arrays

    def check(self, where):
        for array in self.arrays:
            found = np.frombuffer(array.data, np.float64)
            assert (found == self.number).all(), f"{where} sees a slab that was written again"


class Worker:
    """A media worker: maps the slabs it is given, and writes them."""

    def __init__(self, world, api):
        self.world = world
        self.api = api
        self.slabs = api.pool.writer(self.dropped)
        self.mappings = {}
        self.granted = []

    def grant(self, nbytes):
        grant = self.slabs.grant(nbytes)
        if grant is None:
            return False
        slab = grant.slab
        if grant.fd is not None:
            self.mappings[slab.number] = map_memory(grant.fd, slab.nbytes, writable=True)
            os.close(grant.fd)
        writer = self.world.writers.setdefault(slab.number, self)
        assert writer is self, "a slab has two writers"
        self.granted.append(slab)
        return True

    def grant_ahead(self):
        slab = self.slabs.grant_ahead()
        if slab is None:
            return False
        assert slab.number in self.mappings, "a slab that is not mapped was granted ahead"
        self.granted.append(slab)
        return True

    def finish(self):
        """The item that was written into all granted slabs."""
        number = float(self.world.next_number())
        arrays = []
        for slab in self.granted:
            memory = self.mappings[slab.number].view(np.float64)
            memory[:] = number
            del memory
            arrays.append(slab.array("float64", (16,), 64, 128))
        self.give_up()
        return Item(number, arrays)

    def give_up(self):
        self.slabs.finish(self.granted)
        self.granted = []
        self.unmap()

    def dropped(self):
        if not self.granted:
            self.unmap()

    def unmap(self):
        for number in self.slabs.take_dropped():
            self.mappings.pop(number, None)

    def die(self):
        self.mappings.clear()
        self.slabs.close()
        self.granted = []


class Api:
    def __init__(self, world, name, num_workers=2):
        self.world = world
        self.name = name
        self.pool = world.make_pool(lambda: None, clock=world.clock, lease_timeout=0)
        self.workers = [Worker(world, self) for _ in range(num_workers)]
        self.items = []
        self.encoder = MessageEncoder()
        self.to_engine = deque()
        self.from_engine = deque()
        self.lost_a_message = False
        self.connect()

    def connect(self):
        self.epoch = self.world.engine.epoch
        self.pool.open(self.world.engine.owner.capacity_bytes)

    def flush(self):
        changes = self.pool.take_changes()
        if changes is not None:
            message = LeaseSlabs(self.epoch, changes.given_back, changes.uses, changes.wanted)
            self.to_engine.append(self.encoder.encode(message))

    def send(self, item):
        self.flush()
        arrays = {str(n): array for n, array in enumerate(item.arrays)}
        keyed = KeyedItem(
            int(item.number).to_bytes(32, "big"), ProcessedItem("image", arrays, EXPANSION)
        )
        message = UpdateCache(self.epoch, 1, CacheOps(adds=(keyed,)))
        self.to_engine.append([bytes(frame) for frame in self.encoder.encode(message)])

    def receive(self):
        kind, *rest = self.from_engine.popleft()
        if kind == "leased":
            self.pool.leased(*rest)
        elif kind == "released":
            self.pool.released(*rest)
        elif kind == "reclaim":
            self.pool.reclaim()
        elif kind == "unreadable":
            self.pool.settle()
        self.flush()

    def hang_up(self):
        for kind, *rest in self.from_engine:
            if kind == "leased":
                for fd in rest[1]:
                    os.close(fd)
        self.from_engine.clear()
        self.to_engine.clear()

    def kill(self):
        """The process ends: the kernel takes its descriptors and mappings."""
        for worker in self.workers:
            worker.mappings.clear()
            worker.granted = []
        self.items.clear()
        self.pool.lose()
        self.pool._gone.clear()
        self.hang_up()


class Engine:
    def __init__(self, world, epoch, capacity):
        self.world = world
        self.epoch = epoch
        self.owner = world.make_owner(capacity)
        self.decoder = client_message_decoder()
        self.held = []

    def receive(self, api):
        frames = api.to_engine.popleft()

        def read_slab(*place):
            return self.owner.array(api.name, *place)

        try:
            message = self.decoder.decode(frames, read_slab)
        except ProtocolError:
            api.from_engine.append(("unreadable",))
            return
        if isinstance(message, LeaseSlabs):
            leases = self.owner.change(api.name, message.given_back, message.uses, message.wanted)
            if leases.slabs:
                SlabsLeased(leases.slabs)
                api.from_engine.append(("leased", leases.slabs, leases.descriptors))
            if leases.is_short:
                for each in self.world.apis:
                    each.from_engine.append(("reclaim",))
            return
        for keyed in message.ops.adds:
            number = float(int.from_bytes(keyed.key, "big"))
            self.held.append(Item(number, list(keyed.item.arrays.values())))

    def die(self):
        """The process ends: the kernel takes its mappings."""
        self.held.clear()
        self.owner._slabs.clear()
        self.owner._to_tell.clear()
        self.owner._gone.clear()

    def collect(self):
        for name, uses in self.owner.collect().items():
            for api in self.world.apis:
                if api.name == name:
                    api.from_engine.append(("released", uses))


class World:
    def __init__(self, capacity=8 * SMALLEST, num_apis=2, make_pool=SlabPool, make_owner=SlabOwner):
        self.now = 0.0
        self.make_pool = make_pool
        self.make_owner = make_owner
        self.capacity = capacity
        self.number = 0
        self.writers = {}
        self.descriptors = open_descriptors()
        self.mappings = slab_mappings()
        self.engine = Engine(self, 1, capacity)
        self.num_made = 0
        self.apis = []
        for _ in range(num_apis):
            self.add_api()

    def clock(self):
        return self.now

    def next_number(self):
        self.number += 1
        return self.number

    def add_api(self):
        self.num_made += 1
        self.apis.append(Api(self, f"api{self.num_made}"))

    def kill_api(self, api):
        api.kill()
        self.apis.remove(api)
        self.engine.owner.end(api.name)
        self.add_api()

    def kill_worker(self, worker):
        worker.die()
        workers = worker.api.workers
        workers[workers.index(worker)] = Worker(self, worker.api)

    def restart_engine(self):
        for api in self.apis:
            api.hang_up()
            api.pool.lose()
        self.engine.die()
        self.engine = Engine(self, self.engine.epoch + 1, self.capacity)
        for api in self.apis:
            api.connect()

    def deliver_all(self):
        """Until nothing more is under way."""
        while True:
            for api in self.apis:
                api.flush()
            self.engine.collect()
            under_way = [api for api in self.apis if api.to_engine or api.from_engine]
            if not under_way:
                return
            for api in under_way:
                if api.to_engine:
                    self.engine.receive(api)
                if api.from_engine:
                    api.receive()

    def check(self):
        owner = self.engine.owner
        owner.check_integrity()
        for api in self.apis:
            api.pool.check_integrity()
            for item in api.items:
                item.check("an API process")
        for item in self.engine.held:
            item.check("the engine")
        viewed = {a.place.slab for item in self.engine.held for a in item.arrays if a.place}
        assert owner.nbytes >= sum(slab.nbytes for slab in viewed), "memory is not counted"

    def end(self):
        """Everything is let go: nothing may be left."""
        for api in self.apis:
            for worker in api.workers:
                worker.give_up()
            api.items.clear()
        for _ in range(2):  # messages under way bring more
            self.deliver_all()
            self.engine.held.clear()
        self.deliver_all()
        for api in self.apis:
            assert api.pool.leased_sizes() == self.engine.owner.leased(api.name), "sides differ"
        for _ in range(2):  # the first one notices what is free
            for api in self.apis:
                api.pool.sweep()
            self.now += 1000
        self.deliver_all()
        for api in self.apis:
            assert api.pool.leased_sizes() == {}, "slabs are lost in an API process"
            api.pool.check_integrity()
        assert self.engine.owner.nbytes == 0, "slabs are lost in the engine"
        assert slab_mappings() <= self.mappings, "mappings are left"
        assert open_descriptors() <= self.descriptors, "descriptors are left"


def float_array(*values):
    data = np.array(values, np.float32)
    return Array("float32", data.shape, data.tobytes())
