"""The encoder batches what it may, keeps outputs by key, and lets one item fail alone."""

from __future__ import annotations

import pytest
import torch

from lookonce.errors import RequestFailedError
from lookonce.model.encoder import Encoder
from lookonce.model.families.base import ModelFamily
from lookonce.types.media import Array, Expansion, ProcessedItem
from lookonce.types.step import EmbedSlice, EncodeItem, StepPlan

WIDTH = 4


class CountingFamily(ModelFamily):
    """Encodes an item of n numbers as n rows of that number; a negative one is an error."""

    modalities = ("image",)

    def __init__(self) -> None:
        self.calls: list[int] = []

    @property
    def row_width(self) -> int:
        return WIDTH

    def batch_key(self, modality, item):
        return None if item["values"][0] == 99 else modality

    def encode(self, modality, items):
        self.calls.append(len(items))
        values = torch.cat([item["values"] for item in items])
        if (values < 0).any():
            raise ValueError("negative")
        rows = values[:, None].expand(-1, WIDTH).contiguous()
        return list(rows.split([len(item["values"]) for item in items]))


@pytest.fixture
def family() -> CountingFamily:
    return CountingFamily()


@pytest.fixture
def encoder(family) -> Encoder:
    return Encoder(family, torch.float32, torch.device("cpu"))


def item(name: str, *values: float, rows: int | None = None) -> EncodeItem:
    data = torch.tensor(values, dtype=torch.float32).numpy().tobytes()
    expansion = Expansion(((7, len(values) if rows is None else rows),), 7)
    array = Array("float32", (len(values),), data)
    return EncodeItem(name.encode(), ProcessedItem("image", {"values": array}, expansion))


def test_items_of_one_kind_are_encoded_in_one_call(encoder, family):
    report = encoder.run([item("a", 1, 1), item("b", 2)])
    assert family.calls == [2]
    assert set(report.seconds) == {b"a", b"b"}
    rows = encoder.rows([EmbedSlice(b"b", 0, 1, 0), EmbedSlice(b"a", 1, 2, 1)])
    assert rows[:, 0].tolist() == [2, 1]


def test_items_that_must_be_alone_are(encoder, family):
    encoder.run([item("a", 99), item("b", 99), item("c", 1)])
    assert sorted(family.calls) == [1, 1, 1]


def test_a_failing_item_fails_alone(encoder):
    report = encoder.run([item("good", 1), item("bad", -1), item("fine", 2)])
    assert list(report.failed) == [b"bad"]
    assert isinstance(report.failed[b"bad"], RequestFailedError)
    assert b"good" in encoder
    assert b"fine" in encoder
    assert b"bad" not in encoder


def test_output_of_another_size_than_promised_is_a_failure(encoder):
    assert list(encoder.run([item("short", 1, 2, rows=3)]).failed) == [b"short"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_an_output_that_is_no_number_fails_alone(encoder, wrong):
    report = encoder.run([item("good", 1), item("bad", 1, wrong), item("fine", 2)])
    assert list(report.failed) == [b"bad"]
    assert "not finite" in report.failed[b"bad"].message
    assert b"good" in encoder
    assert b"fine" in encoder
    assert b"bad" not in encoder


def plan(**fields) -> StepPlan:
    return StepPlan(1, **fields)


def test_an_output_goes_to_the_host_and_comes_back_without_being_encoded_again(encoder, family):
    encoder.execute(plan(encode=(item("a", 1, 2),)))
    encoder.execute(plan(offload=(b"a",), dropped_outputs=(b"a",)))
    assert b"a" not in encoder
    assert encoder.num_host_bytes == 2 * WIDTH * 4
    encoder.execute(plan(restore=(b"a",)))
    assert encoder.rows([EmbedSlice(b"a", 0, 2, 0)])[:, 0].tolist() == [1, 2]
    assert family.calls == [1]


def test_one_output_may_leave_and_another_come_back_in_one_step(encoder):
    encoder.execute(plan(encode=(item("a", 1), item("b", 2))))
    encoder.execute(plan(offload=(b"a",), dropped_outputs=(b"a",)))
    report = encoder.execute(plan(offload=(b"b",), dropped_outputs=(b"b",), restore=(b"a",)))
    assert report.lost_copies == []
    assert (b"a" in encoder, b"b" in encoder) == (True, False)


def test_a_dropped_copy_is_gone(encoder):
    encoder.execute(plan(encode=(item("a", 1),)))
    encoder.execute(plan(offload=(b"a",), dropped_outputs=(b"a",)))
    encoder.execute(plan(dropped_host=(b"a",)))
    assert encoder.num_host_bytes == 0
    assert list(encoder.execute(plan(restore=(b"a",))).failed) == [b"a"]


def test_an_output_there_is_not_is_a_lost_copy_and_no_error(encoder):
    assert encoder.execute(plan(offload=(b"a",))).lost_copies == [b"a"]


def test_held_outputs_are_not_encoded_again(encoder, family):
    encoder.run([item("a", 1)])
    encoder.run([item("a", 1)])
    assert family.calls == [1]


def test_dropping_frees_exactly_the_items_own_bytes(encoder):
    encoder.run([item("a", 1, 1, 1), item("b", 2)])
    assert encoder.num_bytes == 4 * WIDTH * 4
    encoder.drop([b"a", b"never seen"])
    assert encoder.num_bytes == WIDTH * 4
    kept = encoder.rows([EmbedSlice(b"b", 0, 1, 0)])
    assert kept.untyped_storage().nbytes() == WIDTH * 4
