"""cuDNN's execution plans for one convolution: list them with notes and workspace, and build one.

This module needs the optional package nvidia-cudnn-frontend. Plans are identified by name, because
their order changes with the version of cuDNN.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import torch

from steadytorch.conv.denylist import denied, engine_number
from steadytorch.conv.frontend import Target, frontend, version
from steadytorch.conv.problem import ConvProblem, Layout, strides
from steadytorch.errors import UnsupportedError, first_line
from steadytorch.results.conv import NONDETERMINISTIC

WORKSPACE_CAP_BYTES = 256 * 2**20
"""Default cap; fixed, so that the set of engines does not depend on free memory."""
INPUT, WEIGHT, BIAS, OTHER, OUTPUT = 1, 2, 3, 4, 9
"""Tensor IDs of a graph. The gradient of the output is INPUT in dgrad, and WEIGHT in wgrad."""

_NOTES = (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    NONDETERMINISTIC,
    "WINOGRAD",
    "FFT",
)
_RUNTIME = "RUNTIME_COMPILATION"
_NEEDS = re.compile(r"[Ww]orkspace.*?(\d+)\s*$", re.DOTALL)
_KNOB = re.compile(r"_k(\d+)=(-?\d+)")
_KNOBS = {
    1: "SWIZZLE",
    2: "TILE_SIZE",
    4: "EDGE",
    11: "MULTIPLY",
    12: "SPLIT_K_BUF",
    13: "TILEK",
    14: "STAGES",
    15: "REDUCTION_MODE",
    17: "SPLIT_K_SLC",
    18: "IDX_MODE",
    23: "SPECFILT",
    24: "KERNEL_CFG",
    25: "WORKSPACE",
    27: "TILE_CGA_M",
    28: "TILE_CGA_N",
    29: "BLOCK_SIZE",
    30: "OCCUPANCY",
    31: "ARRAY_SIZE_PER_THREAD",
    33: "SPLIT_COLS",
    34: "TILE_ROWS",
    35: "TILE_COLS",
    36: "LOAD_SIZE",
    37: "CTA_COUNT",
    38: "STREAM_K",
    39: "SPLIT_P_SLC",
    40: "TILE_M",
    41: "TILE_N",
    42: "WARP_SPEC_CFG",
    43: "SWAP_AB",
}
"""The frontend's knobs by their numbers in plan names.

The numbers are those of `cudnnBackendKnobType_t` in cuDNN's header cudnn_graph.h. Knobs that are
deprecated there are missing in the frontend."""
_TYPES = {"fp16": "HALF", "bf16": "BFLOAT16", "fp32": "FLOAT", "tf32": "FLOAT"}


class Filters(msgspec.Struct, frozen=True):
    """Conditions that an engine must meet to be permitted.

    Attributes:
        workspace_cap_bytes: maximum workspace of an engine.
        deterministic: permit only engines with bitwise reproducible results.
        runtime_compiled: also permit engines that cuDNN compiles when built, in 0.4 to 1.1 s each.
    """

    workspace_cap_bytes: int = WORKSPACE_CAP_BYTES
    deterministic: bool = False
    runtime_compiled: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether engines must be deterministic, by this filter or by PyTorch's settings."""
        own = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        return self.deterministic or bool(own)


class Engine(msgspec.Struct, frozen=True):
    """A plan offered by cuDNN, not yet built.

    Attributes:
        name: engine and knobs, e.g. `eng41_k2=4_k13=0`.
        index: position in the heuristic's order.
        workspace_bytes: workspace that the plan needs; None if unknown before building.
        notes: cuDNN's numerical and behaviour notes.
        excluded: why the plan must not be used, or None.
    """

    name: str
    index: int
    workspace_bytes: int | None
    notes: tuple[str, ...] = ()
    excluded: str | None = None


class Graph:
    """cuDNN graph of one convolution, with the plans that cuDNN's heuristics list.

    Args:
        problem: the convolution.
        target: the device.
        wanted: name of the only plan needed. The plan is made from engine and knobs without the
            heuristics, in a twentieth of the time. If this fails, all plans are listed.

    Attributes:
        names: names of the plans, in the heuristic's order.

    Raises:
        UnsupportedError: cuDNN has no engine for the problem.
    """

    def __init__(self, problem: ConvProblem, target: Target, wanted: str | None = None) -> None:
        cudnn = frontend()
        self.problem = problem
        self._number = getattr(cudnn.data_type, _TYPES[problem.number])
        try:
            if wanted is None or not self._made(wanted, target):
                self._begin(target)
                modes = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
                self._graph.create_execution_plans(modes)
        except Exception as error:
            raise UnsupportedError(
                f"cuDNN has no engine for {problem}: {first_line(error)}"
            ) from None
        count = self._graph.get_execution_plan_count()
        self.names = tuple(self._graph.get_plan_name_at_index(i) for i in range(count))

    def _begin(self, target: Target) -> None:
        """Build the cuDNN operation graph, without execution plans."""
        cudnn = frontend()
        settings: dict[str, Any] = {
            "io_data_type": self._number,
            "intermediate_data_type": cudnn.data_type.FLOAT,
            "compute_data_type": cudnn.data_type.FLOAT,
        }
        place = (
            {"handle": target.handle}
            if target.described is None
            else {"device_property": target.described}
        )
        self._graph: Any = cudnn.pygraph(**settings, **place)
        self._state()
        self._graph.validate()
        self._graph.build_operation_graph()

    def _made(self, name: str, target: Target) -> bool:
        """Build the graph with only the plan of this name; return False if cuDNN cannot make it."""
        engine, knobs = engine_number(name), _knobs(name)
        if engine is None or knobs is None:
            return False
        self._begin(target)
        try:
            self._graph.create_execution_plan(engine, knobs)
            return self._graph.get_plan_name_at_index(0) == name
        except Exception:  # about 4 % of the listed plans cannot be made this way
            return False

    def build(self, index: int) -> int:
        """Build a plan and return its workspace in bytes.

        Raises:
            UnsupportedError: cuDNN cannot build the plan; the message says why.
        """
        try:
            self._graph.build_plan_at_index(index)
        except Exception as error:
            raise UnsupportedError(f"does not build: {first_line(error)}") from None
        return int(self._graph.get_workspace_size_plan_at_index(index))

    def execute(self, index: int, pointers: dict[int, int], workspace: int, handle: int) -> None:
        """Enqueue a built plan on the handle's stream.

        Args:
            index: index of the plan.
            pointers: addresses by tensor ID (INPUT, WEIGHT, ...), aligned to 16 bytes.
            workspace: address of the workspace; 0 if none is needed.
            handle: a cuDNN handle of this thread.
        """
        self._graph.execute_plan_at_index(pointers, workspace, index, handle)

    def runtime_compiled(self, index: int) -> bool:
        """Whether cuDNN compiles the plan when it is built."""
        notes = self._graph.get_behavior_notes_for_plan_at_index(index)
        return any(note.name == _RUNTIME for note in notes)

    def refusals(self, note: str | None) -> list[str | None]:
        """Forbid a numerical note, then return each plan's build error; None if a plan builds.

        If `note` is None, any workspace is forbidden instead; the build errors then state the size
        needed. Rejected plans stay rejected, so call `refusals` on a separate graph.
        """
        if note is None:
            self._graph.deselect_workspace_greater_than(-1)
        else:
            member = getattr(frontend().numerical_note, note)
            self._graph.deselect_numeric_notes([member])
            # Every plan is then rejected, for its note or its workspace, so nothing gets built.
            self._graph.deselect_workspace_greater_than(-1)
        return [self._refusal(index) for index in range(len(self.names))]

    def _refusal(self, index: int) -> str | None:
        try:
            self._graph.build_plan_at_index(index)
        except Exception as error:
            return str(error)
        return None

    def _tensor(self, shape: tuple[int, ...], uid: int, layout: Layout) -> Any:
        dims = [*shape[:2], *([1] if len(shape) == 3 else []), *shape[2:]]
        return self._graph.tensor(
            dim=dims, stride=strides(dims, layout), data_type=self._number, uid=uid
        )

    def _state(self) -> None:
        """Add the problem's tensors and operations to the graph."""
        problem, layout = self.problem, self.problem.layout
        flat = len(problem.input) == 3
        window = {
            "padding": [*([0] if flat else []), *problem.padding],
            "stride": [*([1] if flat else []), *problem.stride],
            "dilation": [*([1] if flat else []), *problem.dilation],
        }
        if problem.operation == "fprop":
            x = self._tensor(problem.input, INPUT, layout)
            w = self._tensor(problem.weight, WEIGHT, layout)
            y = self._graph.conv_fprop(image=x, weight=w, **window)
            self._finish(self._epilogue(y), problem.output)
        elif problem.operation == "dgrad":
            dy = self._tensor(problem.output, INPUT, layout)
            w = self._tensor(problem.weight, WEIGHT, layout)
            self._finish(self._graph.conv_dgrad(loss=dy, filter=w, **window), problem.input)
        else:
            x = self._tensor(problem.input, INPUT, layout)
            dy = self._tensor(problem.output, WEIGHT, layout)
            self._finish(self._graph.conv_wgrad(image=x, loss=dy, **window), problem.weight)

    def _epilogue(self, y: Any) -> Any:
        # cuDNN has precompiled engines for this order; with the bias first, it must compile them.
        problem = self.problem
        if problem.adds:
            y = self._graph.add(a=y, b=self._tensor(problem.output, OTHER, problem.layout))
        if problem.biased:
            shape = (1, problem.weight[0], *(1,) * (len(problem.input) - 2))
            y = self._graph.bias(input=y, bias=self._tensor(shape, BIAS, problem.layout))
        return self._graph.relu(input=y) if problem.rectified else y

    def _finish(self, y: Any, shape: tuple[int, ...]) -> None:
        dims = [*shape[:2], *([1] if len(shape) == 3 else []), *shape[2:]]
        y.set_output(True).set_data_type(self._number).set_uid(OUTPUT)
        y.set_dim(dims).set_stride(strides(dims, self.problem.layout))


def list_engines(
    problem: ConvProblem, target: Target, filters: Filters | None = None
) -> list[Engine]:
    """List every plan for a convolution without building it; excluded plans have a reason.

    Raises:
        UnsupportedError: cuDNN has no engine for the problem.
    """
    filters = filters or Filters()
    graph = Graph(problem, target)
    needs = [_needed(text) for text in Graph(problem, target).refusals(None)]
    notes = [[_RUNTIME] if graph.runtime_compiled(i) else [] for i in range(len(graph.names))]
    for note in _NOTES:
        for found, refusal in zip(notes, Graph(problem, target).refusals(note), strict=True):
            if refusal is not None and _needed(refusal) is None:
                found.append(note)
    here = version()
    engines: list[Engine] = []
    for index, (name, need, found) in enumerate(zip(graph.names, needs, notes, strict=True)):
        # The fallback list repeats some plans of the heuristics.
        if name in graph.names[:index]:
            continue
        engine = Engine(name, index, need, tuple(found))
        reason = denied(problem, name, here, target.capability)
        reason = reason or excluded(engine, problem, filters)
        engines.append(msgspec.structs.replace(engine, excluded=reason))
    return engines


def excluded(engine: Engine, problem: ConvProblem, filters: Filters) -> str | None:
    """Reason why the filters exclude an engine; None if they permit it."""
    need = engine.workspace_bytes
    objections = (
        (
            need is not None and need > filters.workspace_cap_bytes,
            f"needs {(need or 0) / 2**20:.0f} MiB of workspace, over the cap of "
            f"{filters.workspace_cap_bytes / 2**20:.0f} MiB",
        ),
        ("DOWN_CONVERT_INPUTS" in engine.notes, "rounds its inputs"),
        (
            problem.number == "fp32" and "TENSOR_CORE" in engine.notes,
            "computes in TF32, which float32 does not allow",
        ),
        (
            filters.repeatable and NONDETERMINISTIC in engine.notes,
            "results may differ from run to run, as cuDNN notes",
        ),
        (
            not filters.runtime_compiled and _RUNTIME in engine.notes,
            "needs run-time compilation, up to 1 s each time",
        ),
    )
    return next((reason for holds, reason in objections if holds), None)


def _knobs(name: str) -> dict[Any, int] | None:
    """Parse the knobs in a plan's name; None if the frontend lacks one of the knobs."""
    members, found = frontend().knob_type, {}
    for number, value in _KNOB.findall(name):
        if int(number) not in _KNOBS:
            return None
        found[getattr(members, _KNOBS[int(number)])] = int(value)
    return found


def _needed(refusal: str | None) -> int | None:
    found = None if refusal is None else _NEEDS.search(refusal)
    return None if found is None else int(found[1])
