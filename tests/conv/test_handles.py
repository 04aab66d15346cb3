from __future__ import annotations

import contextlib
import threading
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from steadytorch.conv import handles
from steadytorch.conv.handles import handle

DEVICE = torch.device("cuda", 0)


class Library:
    """Fake cuDNN that counts calls and records the stream of each handle.

    Attributes:
        made: number of handles.
        set: each call that set a handle's stream, as (handle, stream).
        destroyed: handles that are no more.
    """

    def __init__(self):
        self.made, self.set, self.destroyed = 0, [], []
        self.current = threading.local()

    def create_handle(self):
        self.made += 1
        return self.made

    def set_stream(self, handle, stream):
        self.set.append((handle, stream))

    def destroy_handle(self, number):
        self.destroyed.append(number)

    def stream_of(self, index):
        return getattr(self.current, "stream", 0)


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(handles, "frontend", lambda: made)
    monkeypatch.setattr(handles, "HANDLES", handles.Handles())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", made.stream_of, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return made


def in_threads(count, run):
    threads = [Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_stream_is_set_when_it_changes_and_not_otherwise(library):
    for stream in (0, 0, 5, 5, 5, 0, 0):
        library.current.stream = stream
        assert handle(DEVICE).on_current_stream() == 1
    assert library.set == [(1, 0), (1, 5), (1, 0)]
    assert library.made == 1


def test_each_thread_has_a_handle_of_its_own(library):
    kept = []

    def run():
        kept.append(handle(DEVICE))
        library.current.stream = 10 + kept[-1].number
        for _ in range(5):
            kept[-1].on_current_stream()

    in_threads(1, run)
    in_threads(1, run)
    in_threads(1, run)
    assert [each.number for each in kept] == [1, 2, 3]
    assert library.set == [(1, 11), (2, 12), (3, 13)]


def test_each_device_has_a_handle_of_its_own(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    numbers = [handle(torch.device(name)).number for name in ("cuda:0", "cuda:1", "cuda", "cuda:0")]
    assert numbers == [1, 2, 2, 1]


def test_a_handle_goes_with_its_thread_unless_a_plan_holds_it(library):
    held = []
    in_threads(1, lambda: handle(DEVICE))
    in_threads(1, lambda: held.append(handle(DEVICE)))
    assert library.destroyed == [1]


def test_the_end_of_the_process_leaves_handles_alone(library, monkeypatch):
    handle(DEVICE)
    monkeypatch.setattr(handles, "sys", SimpleNamespace(is_finalizing=lambda: True))
    handles.HANDLES.by_device.clear()
    assert library.destroyed == []
