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
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GROUP = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Ranks": "[0, 1]",
}
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
    """The files of all ranks; on GPUs the host waits at the end of each step.

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


def host_bound_job(
    host_us: Sequence[int], offset_us: Sequence[int], steps: int = 12, blocked_us: int = 0
) -> list[bytes]:
    """The files of ranks on GPUs whose hosts launch work more slowly than it runs.

    Each step has ten kernels of 1/20 of the fastest host's step, and then a collective. A rank
    joins the collective of a step once its host has launched it, and leaves it with the latest.

    Args:
        host_us: time of a host's step by rank, without `blocked_us`.
        offset_us: start of a host's first step by rank.
        steps: number of steps.
        blocked_us: part of each step of the faster hosts in which a launch waits for room, as it
            does once a host is a thousand launches ahead of its GPU.
    """
    slowest = max(host_us)
    step = [us + (blocked_us if us < slowest else 0) for us in host_us]
    events: list[list[syn.Event]] = [[] for _ in host_us]
    kernel = min(host_us) * US // 20
    for number in range(steps):
        begins = [(o + number * us) * US for o, us in zip(offset_us, step, strict=True)]
        launched = [b + host_us[r] * US * 9 // 10 for r, b in enumerate(begins)]
        end = max(launched) + 3 * US + TRANSFER
        for rank, begin in enumerate(begins):
            mine, identity = events[rank], 100 * number + 1
            mine.append(syn.step(number, begin, begin + step[rank] * US))
            for place in range(10):
                at = begin + place * host_us[rank] * US * 9 // 100
                gpu = (at + 3 * US, at + 3 * US + kernel)
                call = (at, at + 2 * US)
                mine += syn.launch("gemm", call=call, gpu=gpu, correlation=identity + place)
            mine += syn.launch(
                NCCL,
                call=(launched[rank], launched[rank] + 2 * US),
                gpu=(launched[rank] + 3 * US, end),
                correlation=identity + 10,
                stream=20,
                details=GROUP,
            )
            if step[rank] > host_us[rank]:
                waits = begin + host_us[rank] * US
                mine.append(syn.runtime("cudaLaunchKernel", waits, waits + blocked_us * US))
    return [_file(each, rank, len(host_us), True) for rank, each in enumerate(events)]


def _one(
    gpu: bool, number: int, now: int, least: int, mine: int, end: int, where: str, marked: bool
) -> list[syn.Event]:
    mark = [syn.step(number, now, end)] if marked else []
    if not gpu:
        extra = [] if now + least == mine else [_range(where, now + least, mine)]
        work = syn.op("aten::mm", now, now + least)
        gloo = syn.annotation("gloo:all_reduce", mine, end, thread=GLOO_THREAD)
        return [*mark, work, *extra, gloo]
    return [
        *mark,
        *syn.launch("gemm", call=(now, now + 1), gpu=(now, mine), correlation=2 * number),
        *syn.launch(
            NCCL,
            call=(now + 1, now + 2),
            gpu=(mine, end),
            correlation=2 * number + 1,
            stream=20,
            details=GROUP,
        ),
        syn.runtime("cudaStreamSynchronize", now + 2, end),
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
