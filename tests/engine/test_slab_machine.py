"""Slabs under every interleaving of both halves, and proof that the machine would notice errors.

Hypothesis, and random steps from seeds, drive `slab_world`: API processes with workers, and an
engine, any of which may die. The mutations at the end break one rule each; the same machine must
find every one.
"""

from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from lookonce.cache.slab_pool import LeasedSlab, SlabPool
from lookonce.cache.slabs import SMALLEST, SlabOwner
from tests.support.drawn_steps import BOOLEAN, DrawnSteps, first, one_of, run_seeds, step
from tests.support.engine.slab_world import Worker, World

PICK = one_of(0, 1, 2, 3)
SELDOM = one_of(True, False, False)
SIZES = one_of(SMALLEST, SMALLEST, SMALLEST, SMALLEST + 1, 5 * SMALLEST)


def build_machine(**world_parts):
    class Machine(DrawnSteps):
        @first(capacity=one_of(1, 4, 8, 16), is_warm=BOOLEAN)
        def begin(self, capacity, is_warm):
            self.world = World(capacity * SMALLEST, **world_parts)
            if is_warm:
                for api in self.world.apis:
                    api.workers[0].grant(SMALLEST)
                self.world.deliver_all()

        def pick(self, things, number):
            return things[number % len(things)] if things else None

        def worker(self, who):
            api = self.pick(self.world.apis, who)
            return self.pick(api.workers, who // 2)

        @step(who=PICK, nbytes=SIZES)
        def grant(self, who, nbytes):
            self.worker(who).grant(nbytes)

        @step(who=PICK)
        def grant_ahead(self, who):
            self.worker(who).grant_ahead()

        @step(who=PICK)
        def finish_job(self, who):
            worker = self.worker(who)
            worker.api.items.append(worker.finish())

        @step(
            who=PICK,
            nbytes=SIZES,
            keep=BOOLEAN,
            ahead=BOOLEAN,
            then=one_of("deliver", "wait", "spoil"),
        )
        def whole_job(self, who, nbytes, keep, ahead, then):
            worker = self.worker(who)
            if not (ahead and worker.grant_ahead()) and not worker.grant(nbytes):
                self.world.deliver_all()  # the lease comes
                if not worker.grant(nbytes):
                    return
            item = worker.finish()
            worker.api.send(item)
            if keep:
                worker.api.items.append(item)
            if then == "deliver":
                self.world.deliver_all()
            elif then == "spoil":
                worker.api.to_engine[-1] = [b"\xc1"]

        @step(who=PICK, which=PICK, keep=SELDOM)
        def send_again_while_the_release_is_under_way(self, who, which, keep):
            api = self.pick(self.world.apis, who)
            item = self.pick(api.items, which)
            if item is not None:
                self.world.deliver_all()
                api.send(item)
                while api.to_engine:
                    self.world.engine.receive(api)
                self.world.engine.held.clear()
                self.world.engine.collect()
                api.send(item)
                if not keep:
                    api.items.remove(item)

        @step(who=PICK)
        def fail_job(self, who):
            self.worker(who).give_up()

        @step(who=PICK, which=PICK, keep=BOOLEAN)
        def send(self, who, which, keep):
            api = self.pick(self.world.apis, who)
            item = self.pick(api.items, which)
            if item is not None:
                api.send(item)
                if not keep:
                    api.items.remove(item)

        @step(who=PICK, which=PICK)
        def drop_in_api_process(self, who, which):
            items = self.pick(self.world.apis, who).items
            if items:
                items.pop(which % len(items))

        @step(which=PICK)
        def drop_in_engine(self, which):
            held = self.world.engine.held
            if held:
                held.pop(which % len(held))

        @step(who=PICK, how_many=one_of(1, 2, 3, 4))
        def deliver_to_engine(self, who, how_many):
            api = self.pick(self.world.apis, who)
            api.flush()
            for _ in range(min(how_many, len(api.to_engine))):
                self.world.engine.receive(api)

        @step(who=PICK, how_many=one_of(1, 2, 3, 4))
        def deliver_to_api(self, who, how_many):
            api = self.pick(self.world.apis, who)
            self.world.engine.collect()
            for _ in range(min(how_many, len(api.from_engine))):
                api.receive()

        @step(who=PICK, really=BOOLEAN)
        def spoil_a_message(self, who, really):
            api = self.pick(self.world.apis, who)
            for number, frames in enumerate(api.to_engine):
                # A request for slabs is small and always readable; what holds items may be not.
                if really and b"lease_slabs" not in bytes(frames[0]):
                    api.to_engine[number] = [b"\xc1"]
                    break

        @step(who=PICK, what=one_of("worker", "api", "engine", *[None] * 4))
        def kill(self, who, what):
            if what == "worker":
                self.world.kill_worker(self.worker(who))
            elif what == "api":
                self.world.kill_api(self.pick(self.world.apis, who))
            elif what == "engine":
                self.world.restart_engine()

        @step(who=PICK, seconds=one_of(1, 50, 70))
        def sweep(self, who, seconds):
            self.world.now += seconds
            self.pick(self.world.apis, who).pool.sweep()

        @step()
        def deliver_all(self):
            self.world.deliver_all()

        @invariant()
        def check(self):
            self.world.check()

        def teardown(self):
            if hasattr(self, "world"):
                self.world.end()

    return Machine


MOST_STEPS = 50


def run(max_examples, **world_parts):
    run_state_machine_as_test(
        build_machine(**world_parts),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=MOST_STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_interleaving_breaks_the_rules_of_slabs():
    run(20)
    run_seeds(build_machine(), 300, MOST_STEPS)


def test_nor_with_one_api_process():
    run(5, num_apis=1)
    run_seeds(build_machine(num_apis=1), 100, MOST_STEPS)


# --- mutations: each must be found ------------------------------------------------------------


def assert_found(how, num_seeds=2000, **world_parts):
    with pytest.raises(AssertionError, match=how):
        run_seeds(build_machine(**world_parts), num_seeds, MOST_STEPS)


def test_forgetting_what_the_engine_still_reads_is_found():
    with patch.object(LeasedSlab, "is_unused", property(lambda self: self.num_views == 0)):
        assert_found("the engine sees a slab that was written again|slabs are lost")


def test_forgetting_views_of_the_api_process_is_found():
    unused = property(lambda self: self.released_use >= self.sent_use)
    with patch.object(LeasedSlab, "is_unused", unused):
        assert_found("an API process sees a slab that was written again|free slabs are unused")


def test_taking_a_release_for_the_last_one_is_found():
    """A use that was sent while the release of the one before was under way is forgotten."""

    class Hasty(SlabPool):
        def released(self, uses):
            uses = [
                (number, self._slabs[number].sent_use)
                for number, _ in uses
                if number in self._slabs
            ]
            super().released(uses)

    assert_found("the engine sees a slab that was written again|slabs are lost", make_pool=Hasty)


def test_releasing_while_a_view_lives_is_found():
    class Hasty(SlabOwner):
        def array(self, *arguments):
            array = super().array(*arguments)
            array.place.slab.num_views -= 1
            return array

    assert_found("written again|views are counted|slabs are lost", make_owner=Hasty)


def test_giving_a_slab_to_another_writer_is_found():
    class Careless(SlabPool):
        def _find_free(self, writer, size):
            for slab in self._free.values():
                if slab.nbytes >= size:
                    return slab
            return None

    assert_found(
        "two writers|mappings are left|slabs are lost|not mapped was granted", make_pool=Careless
    )


def test_keeping_the_slabs_of_a_dead_worker_is_found():
    class Keeps(SlabPool):
        def _settle(self, slab):
            if not slab.writer.is_closed:
                super()._settle(slab)

    assert_found("slabs are lost|sides differ", make_pool=Keeps)


def test_leasing_beyond_the_capacity_is_found():
    class Generous(SlabOwner):
        def lease(self, sender, nbytes):
            capacity, self.capacity_bytes = self.capacity_bytes, 1 << 40
            try:
                return super().lease(sender, nbytes)
            finally:
                self.capacity_bytes = capacity

    assert_found("slabs fit the capacity", make_owner=Generous)


def test_not_counting_slabs_whose_sender_is_gone_is_found():
    class Forgets(SlabOwner):
        def _end(self, slab):
            slab.sender = None
            del self._slabs[slab.number]
            self.nbytes -= slab.nbytes

        def _destroy_if_unused(self, slab):
            pass

    assert_found("memory is not counted|slabs are lost|mappings are left", make_owner=Forgets)


def test_keeping_the_leases_of_a_dead_sender_is_found():
    with patch.object(SlabOwner, "end", lambda self, sender: 0):
        assert_found("slabs are lost in the engine")


def test_not_settling_after_a_lost_message_is_found():
    with patch.object(SlabPool, "settle", lambda self: None):
        assert_found("slabs are lost|sides differ")


def test_keeping_descriptors_is_found():
    class Keeps(SlabPool):
        def _forget(self, slab):
            slab.fd = None
            super()._forget(slab)

    assert_found("descriptors are left", make_pool=Keeps)


def test_not_telling_a_worker_to_unmap_is_found():
    class Silent(SlabPool):
        def _tell_writers(self):
            self._to_tell.clear()

    with patch.object(Worker, "give_up", lambda self: _finish_without_unmapping(self)):
        assert_found("mappings are left", make_pool=Silent)


def _finish_without_unmapping(worker):
    worker.slabs.finish(worker.granted)
    worker.granted = []


def test_a_slab_that_came_ahead_counts_when_it_is_used():
    world = World(num_apis=1)
    (api,) = world.apis
    worker = api.workers[0]
    assert not worker.grant_ahead(), "nothing was asked for yet"
    worker.grant(1000)
    world.deliver_all()
    assert not worker.grant_ahead(), "nothing is mapped yet"
    for _ in range(2):  # one in use, and one spare
        assert worker.grant(1000)
        api.items.append(worker.finish())
        world.deliver_all()
    api.items.clear()
    counted = api.pool.num_grants, api.pool.num_reuses
    assert worker.grant_ahead()
    worker.give_up()
    assert (api.pool.num_grants, api.pool.num_reuses) == counted, "it was not used"
    for _ in range(3):
        assert worker.grant_ahead()
        api.send(worker.finish())
        world.deliver_all()
        world.engine.held.clear()
        world.deliver_all()
    assert (api.pool.num_grants, api.pool.num_reuses) == (counted[0] + 3, counted[1] + 3)
    del worker
    world.end()


def test_a_settled_world_uses_its_slabs_again():
    """The machine is not vacuous: the second item lies in the slab of the first."""
    world = World(num_apis=1)
    (api,) = world.apis
    worker = api.workers[0]
    assert not worker.grant(1000), "nothing is leased yet"
    world.deliver_all()
    for _ in range(5):
        assert worker.grant(1000)
        api.send(worker.finish())
        world.deliver_all()
        world.engine.held.clear()
        world.deliver_all()
    assert world.engine.owner.num_leases == 2, "one in use, and one spare"
    assert (api.pool.num_grants, api.pool.num_reuses) == (5, 4)
    del worker
    world.end()
