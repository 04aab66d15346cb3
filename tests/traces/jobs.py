"""Traces of the ranks of a synthetic job, on a CPU with gloo or on GPUs with NCCL.

    traces = job([[10, 10, 30], [10, 10, 10]])  # own work in us, by rank and step

In each step a rank works, joins a collective, and leaves it when the latest has joined and the data
have moved. Clocks of ranks differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from steadytorch.traces.events import Trace
from steadytorch.traces.reader import parse_trace

from . import synthetic as syn

US = 1_000
TRANSFER = 5 * US
GLOO_THREAD = 77
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def job(
    work_us: Sequence[Sequence[int]],
    *,
    gpu: bool = False,
    transfer: int = TRANSFER,
    first: int = 3,
    where: str = "aten::mm",
    steps: Sequence[Collection[int]] | None = None,
    info: bool = True,
    marked: bool = True,
) -> list[bytes]:
    """The files of all ranks.

    Args:
        work_us: own work in us, by rank and step.
        gpu: whether kernels work and communicate instead of operators.
        transfer: ns that moving the data takes.
        first: number of the first step.
        where: name of the operator that does more than the least work of the step.
        steps: numbers of the steps that each rank records; None for all.
        info: whether the files name their rank.
        marked: whether the files mark their steps.
    """
    events: list[list[syn.Event]] = [[] for _ in work_us]
    now = 0
    for number, works in enumerate(zip(*work_us, strict=True), first):
        least, joined = min(works) * US, now + max(works) * US
        end = joined + transfer
        for rank, work in enumerate(works):
            if steps is not None and number not in steps[rank]:
                continue
            mine = now + work * US
            events[rank] += _one(gpu, number, now, least, mine, end, where, marked)
        now = end
    return [_file(each, rank, len(work_us), info) for rank, each in enumerate(events)]


def _one(
    gpu: bool, number: int, now: int, least: int, mine: int, end: int, where: str, marked: bool
) -> list[syn.Event]:
    mark = [syn.step(number, now, end)] if marked else []
    if not gpu:
        extra = [] if now + least == mine else [_range(where, now + least, mine)]
        work = syn.op("aten::mm", now, now + least)
        gloo = syn.annotation("gloo:all_reduce", mine, end, thread=GLOO_THREAD)
        return [*mark, work, *extra, gloo]
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    group = {
        "Collective name": "allreduce",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
    }
    return [
        *mark,
        *syn.launch("gemm", call=(now, now + 1), gpu=(now, mine), correlation=2 * number),
        *syn.launch(
            name,
            call=(now + 1, now + 2),
            gpu=(mine, end),
            correlation=2 * number + 1,
            stream=20,
            details=group,
        ),
    ]


def _range(name: str, start: int, end: int) -> syn.Event:
    return (syn.annotation if name == DATA else syn.op)(name, start, end)


def _file(events: list[syn.Event], rank: int, size: int, info: bool) -> bytes:
    apart = rank * 10**15  # no clock is like another
    top: dict[str, Any] = {"baseTimeNanoseconds": syn.BASE_NS + apart}
    if info:
        top["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": size}
    return syn.build(events, **top)


def read(files: Sequence[bytes]) -> list[Trace]:
    """The files as traces."""
    return [parse_trace(file, f"rank{rank}.json") for rank, file in enumerate(files)]
