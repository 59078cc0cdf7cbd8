"""The counts of all API processes: exact whoever dies, and bounded in files."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lookonce.server import shared_counts
from lookonce.server.shared_counts import SharedCounts


def numbers(shared):
    return {name: values.numbers[0] for name, values in shared.sums().items()}


def test_any_process_answers_for_all(tmp_path):
    with SharedCounts(tmp_path, 0) as first, SharedCounts(tmp_path, 1) as second:
        first.counts.count("decodes_total").add(2)
        second.counts.count("decodes_total").add(3)
        second.counts.count("bytes", gauge=True).set(7)
        assert numbers(first) == numbers(second) == {"decodes_total": 5, "bytes": 7}


def test_counters_of_a_dead_process_stay_and_its_gauges_go(tmp_path):
    with SharedCounts(tmp_path, 0) as survivor:
        with SharedCounts(tmp_path, 1) as other:
            other.counts.count("decodes_total").add(3)
            other.counts.count("bytes", gauge=True).set(7)
        assert numbers(survivor) == {"decodes_total": 3}
        with SharedCounts(tmp_path, 1) as again:
            again.counts.count("decodes_total").add(1)
            assert numbers(survivor) == numbers(again) == {"decodes_total": 4}


def test_a_killed_process_loses_no_count(tmp_path):
    """It is killed while it counts: what it had told us of by then is there."""
    code = (
        "import sys, pathlib\n"
        "from lookonce.server.shared_counts import SharedCounts\n"
        "shared = SharedCounts(pathlib.Path(sys.argv[1]), 0)\n"
        "count = shared.counts.count('decodes_total')\n"
        "while True:\n"
        "    count.add()\n"
        "    print(int(count.value), flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(1000):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = 1000 + len(process.stdout.readlines())
    with SharedCounts(tmp_path, 0) as successor:
        assert numbers(successor)["decodes_total"] in (told, told + 1)


def test_files_do_not_grow_with_restarts(tmp_path):
    for number in range(20):
        with SharedCounts(tmp_path, 0) as shared:
            shared.counts.count("starts_total").add()
            assert numbers(shared) == {"starts_total": number + 1}
    assert len(list(tmp_path.iterdir())) == 3  # the lock, the folded ones, the last one


@pytest.mark.parametrize("step", ["rename", "unlink"])
def test_a_process_killed_while_it_folds_neither_loses_nor_doubles(tmp_path, monkeypatch, step):
    """Stopped before the file is replaced, or before the folded ones are removed."""
    with SharedCounts(tmp_path, 0) as dead:
        dead.counts.count("decodes_total").add(5)
    with SharedCounts(tmp_path, 1) as reader:
        # `reader` has folded `dead`: let another one die, and its successor too, while it folds.
        with SharedCounts(tmp_path, 0) as dead:
            dead.counts.count("decodes_total").add(7)

        def killed(*arguments):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(shared_counts.Path, step, killed)
            with pytest.raises(KeyboardInterrupt):
                SharedCounts(tmp_path, 0)
        assert numbers(reader) == {"decodes_total": 12}
        for _ in range(2):
            with SharedCounts(tmp_path, 0) as successor:
                assert numbers(successor) == numbers(reader) == {"decodes_total": 12}


class Restarts(RuleBasedStateMachine):
    """Processes start, count and die in any order; the sums are those of a plain number."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.living, self.total = [], 0

    @rule(index=st.integers(0, 2))
    def start(self, index):
        self.living.append(SharedCounts(self.path, index))

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 9), amount=st.integers(1, 9))
    def count(self, which, amount):
        shared = self.living[which % len(self.living)]
        shared.counts.count("decodes_total").add(amount)
        shared.counts.count("bytes", gauge=True).set(1)
        self.total += amount

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 9))
    def die(self, which):
        self.living.pop(which % len(self.living)).__exit__()

    @invariant()
    def sums_are_right(self):
        for shared in getattr(self, "living", []):
            found = numbers(shared)
            assert found.get("decodes_total", 0) == self.total
            assert found.get("bytes", 0) <= len(self.living)

    def teardown(self):
        if hasattr(self, "living"):
            for shared in self.living:
                shared.__exit__()
            self.folder.cleanup()


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
