"""Choices that PyTorch's compiler made by timing, stored with a plan for later processes to repeat.

Inductor chooses launch configurations of Triton kernels, and whether to pad matrix products, by
timing. Each process repeats the timing of Inductor's choices. The timing of kernels that are
shorter than their launch is noisy, so processes choose differently. Two processes that compiled
EfficientNet-B0 on an H100 chose 22 of 46 kernels differently, and their code took 2.17 and 2.20 ms.
For Swin-T, the code that two processes compiled took 2.87 and 3.01 ms.

The stored choices are plain data. Kernel configurations are stored under a digest of the kernel's
source. Inductor ignores a stored configuration if the kernel's set of candidates has changed.
Kernels for another device of the same host have another digest, because their source names the
device.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import torch

from steadytorch.plan.files import write_whole
from steadytorch.plan.record import CompilerChoices

_FILE, _PADDING = "compiler-choices.json", "padding"
_LAUNCH_CYCLES = 40_000
"""GPU clock cycles, 20 us, in which a host enqueues a kernel, two events and a fill."""
_log = logging.getLogger("steadytorch")


class Choices:
    """Compiler choices to repeat in a compilation, and a folder for new padding decisions.

    Args:
        made: choices to repeat.
        folder: where processes that compile for one search share decisions about padding; None to
            keep none.
    """

    def __init__(self, made: CompilerChoices, folder: Path | None = None) -> None:
        self.made, self._folder = made, folder

    def place(self) -> None:
        """Writes the chosen kernel configurations to the compiler's cache, replacing others."""
        if not self.made.kernels:
            return
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        try:
            for name, choice in self.made.kernels.items():
                _write(Path(cache_dir()) / name, json.dumps(choice))
        except OSError as error:
            _log.warning("kernels are tuned anew: the compiler's cache is not writable: %s", error)

    def padded(self, product: str) -> bool | None:
        """Whether to pad a matrix product; None if no process has decided."""
        found = self.made.padded.get(product)
        if found is None and self._folder is not None:
            with suppress(FileNotFoundError):
                found = json.loads(self._path(self._folder, product).read_text("utf-8"))[1]
        return found

    def decide(self, product: str, pads: bool) -> bool:
        """Stores whether to pad a matrix product; returns the decision that was stored first."""
        if self._folder is None:
            return pads
        path = self._path(self._folder, product)
        with suppress(FileExistsError):
            write_whole(path, json.dumps([product, pads]).encode(), replace=False)
        return json.loads(path.read_text("utf-8"))[1]

    def of_process(self) -> CompilerChoices:
        """Compiler choices of the code that this process compiled or loaded from the cache."""
        return CompilerChoices(dict(sorted(_kernels())), dict(sorted(self._decided().items())))

    @property
    def shared(self) -> bool:
        """Whether the processes of one search share padding decisions."""
        return self._folder is not None

    @property
    def pads(self) -> bool:
        """Whether a process of the search has decided to pad a matrix product."""
        return any(self._decided().values())

    def _decided(self) -> dict[str, bool]:
        """Maps each matrix product to the search's decision whether to pad it."""
        noted = [] if self._folder is None else self._folder.glob("*.json")
        return dict(json.loads(path.read_text("utf-8")) for path in noted)

    @staticmethod
    def _path(folder: Path, product: str) -> Path:
        return folder / f"{hashlib.sha256(product.encode()).hexdigest()}.json"


NONE = Choices(CompilerChoices())
_CHOICES: ContextVar[Choices] = ContextVar("steadytorch_compiler_choices", default=NONE)


@contextmanager
def supplied(choices: Choices) -> Iterator[None]:
    """Make the `compile` transform repeat `choices` when it is applied on this thread."""
    before = _CHOICES.set(choices)
    try:
        yield
    finally:
        _CHOICES.reset(before)


def current() -> Choices:
    """Compiler choices that transforms applied on this thread must repeat."""
    return _CHOICES.get()


def put(directory: Path, made: CompilerChoices) -> None:
    """Writes a plan's compiler choices to a directory, where workers read them."""
    (directory / _FILE).write_bytes(msgspec.json.encode(made))


def within(directory: Path) -> Choices:
    """Compiler choices that the workers of a directory share."""
    made = CompilerChoices()
    with suppress(FileNotFoundError):
        made = msgspec.json.decode((directory / _FILE).read_bytes(), type=CompilerChoices)
    return Choices(made, directory / _PADDING)


@contextmanager
def padding(choices: Choices) -> Iterator[None]:
    """Make Inductor pad matrix products as recorded in `choices` while it compiles.

    Inductor is patched process-wide, which is safe because Dynamo compiles under a process-wide
    lock.
    """
    if choices is NONE:
        yield
        return
    from torch._inductor.fx_passes import pad_mm

    decide = pad_mm._should_pad

    def decided(match: Any, mat1: Any, mat2: Any, op: Any, input: Any = None) -> bool:
        product = pad_mm.should_pad_bench_key(match, mat1, mat2, op, input)
        pads = choices.padded(product)
        if pads is None:
            pads = choices.decide(product, bool(decide(match, mat1, mat2, op, input)))
        return pads

    pad_mm.__dict__["_should_pad"] = decided
    try:
        yield
    finally:
        pad_mm.__dict__["_should_pad"] = decide


def fill_queue_before_timing() -> None:
    """Makes Inductor time CUDA kernels with a full launch queue, from now on in this process.

    Without a full queue, the time of a short kernel includes launch gaps, which hide the
    differences between configurations. The device sleeps while the host enqueues the launches. On
    an H100, two processes chose 22 of EfficientNet's 46 kernels differently without a full queue,
    but only 3 with one. With a full queue, EfficientNet's compiled code became 1.7 to 3 % faster.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    pairs = getattr(benchmarker, "get_event_pairs", None)
    if pairs is None or "get_event_pairs" in vars(benchmarker):
        return

    def after_sleep(iterations: int, *args: Any, **kwargs: Any) -> Any:
        found = pairs(iterations, *args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda._sleep(_LAUNCH_CYCLES * iterations)
        return found

    vars(benchmarker)["get_event_pairs"] = after_sleep


def _kernels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the cache file's name and the configuration of each kernel that this process tuned."""
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if heuristics is None:
        return
    for each in gc.get_objects():  # Inductor keeps no list of them
        if not issubclass(type(each), heuristics.CachingAutotuner):
            continue
        saves = getattr(each.save_cache_hook, "__self__", None)  # None with a single configuration
        if saves is not None and saves.local_cache is not None:
            path = Path(saves.local_cache[1])
            with suppress(FileNotFoundError):
                choice = json.loads(path.read_text("utf-8"))
                yield "/".join(path.parts[-2:]), choice


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)
