"""What cuDNN offers for one convolution: plans by name, with notes and workspace, and one built.

Through nvidia-cudnn-frontend, which is optional. Plans are known by name: their places in the list
change with the version of cuDNN.
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
"""Fixed, so that the engines on offer do not depend on what else happens to hold memory."""
INPUT, WEIGHT, BIAS, OTHER, OUTPUT = 1, 2, 3, 4, 9
"""A graph's tensors. The gradient of the output takes the place of INPUT in dgrad, and that of
WEIGHT in wgrad."""

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
"""The frontend's knobs by their numbers in plan names, which are those of `cudnnBackendKnobType_t`
in cuDNN's header cudnn_graph.h; it has none for those that are deprecated there."""
_TYPES = {"fp16": "HALF", "bf16": "BFLOAT16", "fp32": "FLOAT", "tf32": "FLOAT"}


class Filters(msgspec.Struct, frozen=True):
    """Which engines may be used.

    Attributes:
        workspace_cap_bytes: scratch memory an engine may take.
        deterministic: only those that give the same bits on every run.
        runtime_compiled: also those that cuDNN compiles when they are built, 0.4 to 1.1 s each.
    """

    workspace_cap_bytes: int = WORKSPACE_CAP_BYTES
    deterministic: bool = False
    runtime_compiled: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether only deterministic ones may be used: as asked, or as PyTorch's own in force."""
        own = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        return self.deterministic or bool(own)


class Engine(msgspec.Struct, frozen=True):
    """A plan that cuDNN offers, not built.

    Attributes:
        name: engine and knobs, as `eng41_k2=4_k13=0`.
        index: its place in the heuristic's order.
        workspace_bytes: scratch memory it needs; None where it cannot be learnt without building.
        notes: what cuDNN says of it.
        excluded: why it is not to be used, None if it may be.
    """

    name: str
    index: int
    workspace_bytes: int | None
    notes: tuple[str, ...] = ()
    excluded: str | None = None


class Graph:
    """The graph of one problem with the plans that cuDNN's heuristics list for it.

    Args:
        problem: what to compute.
        target: where.
        wanted: name of the one plan that is asked for. It is made of its engine and knobs, without
            asking the heuristics, at a twentieth of the time; where that cannot be, all are listed.

    Attributes:
        names: of the plans, the heuristic's favourite first.

    Raises:
        UnsupportedError: cuDNN has no engine for it.
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
        """Writes the problem down as a graph without plans."""
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
        """Makes the graph with the plan of this name alone; False where cuDNN cannot."""
        engine, knobs = engine_number(name), _knobs(name)
        if engine is None or knobs is None:
            return False
        self._begin(target)
        try:
            self._graph.create_execution_plan(engine, knobs)
            return self._graph.get_plan_name_at_index(0) == name
        except Exception:  # some 4 % of the plans that are listed cannot be made this way
            return False

    def build(self, index: int) -> int:
        """Makes the plan ready to run and returns the bytes of workspace it needs.

        Raises:
            UnsupportedError: cuDNN refuses; the message says why.
        """
        try:
            self._graph.build_plan_at_index(index)
        except Exception as error:
            raise UnsupportedError(f"does not build: {first_line(error)}") from None
        return int(self._graph.get_workspace_size_plan_at_index(index))

    def execute(self, index: int, pointers: dict[int, int], workspace: int, handle: int) -> None:
        """Enqueues a built plan on the handle's stream.

        Args:
            index: of the plan.
            pointers: addresses by tensor (INPUT, WEIGHT, ...), aligned to 16 bytes.
            workspace: address of the scratch memory; 0 where none is needed.
            handle: of cuDNN, used on this thread alone.
        """
        self._graph.execute_plan_at_index(pointers, workspace, index, handle)

    def runtime_compiled(self, index: int) -> bool:
        """Whether building the plan compiles it."""
        notes = self._graph.get_behavior_notes_for_plan_at_index(index)
        return any(note.name == _RUNTIME for note in notes)

    def refusals(self, note: str | None) -> list[str | None]:
        """What cuDNN says to each plan where a note, or any workspace, is not allowed; None: fine.

        Plans stay barred afterwards: ask on a graph made for it.
        """
        if note is None:
            self._graph.deselect_workspace_greater_than(-1)
        else:
            member = getattr(frontend().numerical_note, note)
            self._graph.deselect_numeric_notes([member])
            # Refused for its workspace unless for its note: nothing is built.
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
        """Writes the problem down as operations of the graph."""
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
        # In this order cuDNN has precompiled engines; with the bias first it compiles them.
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
    """Every plan for the problem, those not to be used with the reason; builds none.

    Raises:
        UnsupportedError: cuDNN has no engine for it.
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
        # The fallback list repeats some of what the heuristics gave.
        if name in graph.names[:index]:
            continue
        engine = Engine(name, index, need, tuple(found))
        reason = denied(problem, name, here, target.capability)
        reason = reason or excluded(engine, problem, filters)
        engines.append(msgspec.structs.replace(engine, excluded=reason))
    return engines


def excluded(engine: Engine, problem: ConvProblem, filters: Filters) -> str | None:
    """Why the filters leave an engine out, or None."""
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
            "gives other bits from run to run, by cuDNN's own note",
        ),
        (
            not filters.runtime_compiled and _RUNTIME in engine.notes,
            "is compiled when it is built, which takes up to a second each time",
        ),
    )
    return next((reason for holds, reason in objections if holds), None)


def _knobs(name: str) -> dict[Any, int] | None:
    """The knobs of a plan's name as the frontend takes them; None where it has no such one."""
    members, found = frontend().knob_type, {}
    for number, value in _KNOB.findall(name):
        if int(number) not in _KNOBS:
            return None
        found[getattr(members, _KNOBS[int(number)])] = int(value)
    return found


def _needed(refusal: str | None) -> int | None:
    found = None if refusal is None else _NEEDS.search(refusal)
    return None if found is None else int(found[1])
