"""Every parser of strangers' bytes keeps its rules on any bytes: declared errors, bounded memory.

`make fuzz` runs the same targets for long, guided by coverage (`tools/fuzz.py`).
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.fuzz_targets import TARGETS, Target

EXAMPLES = 40
PEAK_BYTES = 8 << 20
PEAK_PER_BYTE = 256
"""Most memory that an input of some bytes may take."""
INTERESTING = (b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\xff" * 8, b'"', b"\\", b"\r\n")


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A valid input with a few bytes changed, cut, doubled or put elsewhere; or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = at + draw(st.integers(0, 8))
        match draw(st.integers(0, 3)):
            case 0:
                data[at:end] = draw(st.binary(max_size=8))
            case 1:
                data[at:at] = draw(st.sampled_from(INTERESTING))
            case 2:
                del data[at : at + draw(st.integers(1, 64))]
            case 3:
                data[at:at] = data[at:end]
    return bytes(data)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_rules_hold_for_valid_inputs_and_for_what_once_broke_them(name: str) -> None:
    for data in TARGETS[name].corpus():
        TARGETS[name].check(data)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_rules_hold_for_any_bytes(name: str) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated(target.corpus()))
    def keeps_rules(data: bytes) -> None:
        _bounded(target, data)

    keeps_rules()


def _bounded(target: Target, data: bytes) -> None:
    tracemalloc.start()
    try:
        target.check(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= PEAK_BYTES + PEAK_PER_BYTE * len(data), f"{peak} bytes for {len(data)}"
