"""The CPU as a device: order, errors, and who owns the OpenMP team."""

from __future__ import annotations

import threading

import pytest
import torch

from core.devices.base import open_device


def test_work_runs_in_order_behind_the_host() -> None:
    device = open_device("cpu", num_threads=2, graph_backend="cpugraph")
    gate, seen = threading.Event(), []
    device.run(gate.wait)
    for number in range(5):
        device.run(lambda n=number: seen.append(n))
    event = device.record()
    assert seen == []
    gate.set()
    event.wait()
    assert seen == [0, 1, 2, 3, 4]
    device.close()


def test_an_error_reaches_the_next_waiter_and_later_work_is_skipped() -> None:
    device = open_device("cpu", num_threads=1, graph_backend="cpugraph")
    ran = []

    def fail() -> None:
        raise ValueError("bad step")

    device.run(fail)
    device.run(lambda: ran.append(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="bad step"):
            device.record().wait()
    assert ran == []
    device.close()


def test_only_the_stream_has_an_openmp_team() -> None:
    """A second team makes libgomp cut the spinning of both: a step of one row then took half as long again."""
    device = open_device("cpu", num_threads=2, graph_backend="cpugraph")
    counts = []
    device.run(lambda: counts.append(torch.get_num_threads()))
    device.record().wait()
    assert counts == [2]
    assert torch.get_num_threads() == 1
    device.close()
