"""Runs the loss of a training step as compiled code."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadytorch.errors import one_line
from steadytorch.workload.hooks import ON_ALL, ON_ALL_BACKWARD, hooks_on_all
from steadytorch.workload.indices import Indices, checked, find_indices
from steadytorch.workload.private_entry import private_entry
from steadytorch.workload.reads import Reads
from steadytorch.workload.signature import map_tensors, tensors_of

_MOST_COMPILED = 2
"""Maximum number of times that a loss is compiled: one that reads a number that changes at every
step would compile at every step."""
_ON_ALL = (*ON_ALL, *ON_ALL_BACKWARD)
_AS_EAGER = {
    "skip_nnmodule_hook_guards": False,  # hooks on modules of the loss may come later
    "rewrite_assert_with_torch_assert": False,  # a failed assert in a kernel ends the CUDA context
    "trace_numpy": False,  # NumPy's random numbers would come from PyTorch's generator
}


class CompiledLoss:
    """A loss as compiled code, which takes fewer passes over the model's output.

    It serves arguments with the shapes, dtypes and devices of the first call; the output may be
    padded, see `compiled.output_strides`. Random numbers are those that the loss draws itself. A
    loss that does not compile as one graph, for example because it prints or reads a value, is
    called as it is; so is one that would compile a third time.

    Args:
        loss: maps the model's output and the targets to a scalar tensor.

    Attributes:
        loss: as given.
        fallback: why the loss is called as it is now; None if it is not.
    """

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss = loss
        self.fallback = "it reads the environment" if _reads_environment(loss) else None
        self._form: Any = None
        self._times = 0
        self._compiled: dict[torch.dtype | None, Callable[..., Tensor]] = {}

    def __call__(self, output: Any, *targets: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the loss of the model's output.

        Args:
            output: the model's.
            targets: further arguments of the loss.
            dtype: what a single tensor is converted to first; None for none.

        Raises:
            Exception: whatever the loss raises.
        """
        from torch._dynamo import config

        # Dynamo has no guards on hooks of all modules.
        if self.fallback is not None or (any(_ON_ALL) and hooks_on_all(_ON_ALL)):
            return self._own(output, targets, dtype)
        form = [(t.shape, t.dtype, t.device) for t in tensors_of((output, targets))]
        if dtype is not None:
            form[0] = (output.shape, dtype, output.device)
        self._form = self._form or form
        if form != self._form:
            return self._own(output, targets, dtype)
        try:
            with config.patch(_AS_EAGER), nullcontext() if self._times else _at_first():
                return self._compiled_for(dtype)(output, *targets)
        except Exception as error:  # tracing may raise anything
            changes = self._times > _MOST_COMPILED
            cannot = f"it cannot be compiled: {one_line(error, 120)}"
            reason = "values that it reads change" if changes else cannot
        value = self._own(output, targets, dtype)  # raises what the loss raises
        self.fallback = reason
        return value

    def _indices(self, graph: Any, inputs: Any) -> Indices:
        from torch._guards import detect_fake_mode

        fakes = detect_fake_mode(inputs)
        assert fakes is not None
        with fakes:
            given = [fakes.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
            return find_indices(lambda: graph(*given), given)

    def _own(self, output: Any, targets: tuple[Any, ...], dtype: torch.dtype | None) -> Tensor:
        memory = Counter(t.untyped_storage()._cdata for t in tensors_of(output) if _is_strided(t))
        output = map_tensors(partial(_unpadded, memory), output)
        return self.loss(output if dtype is None else output.to(dtype), *targets)

    def _compiled_for(self, dtype: torch.dtype | None) -> Callable[..., Tensor]:
        """The compiled loss, which converts the model's output to the dtype first."""
        if dtype not in self._compiled:
            loss = self.loss if dtype is None else _converting(self.loss, dtype)
            self._compiled[dtype] = torch.compile(
                private_entry(loss), fullgraph=True, dynamic=False, backend=self._compile
            )
        return self._compiled[dtype]

    def _compile(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        from steadytorch.workload.compiler_faults import KeepZeroProducts, refuse_changed

        refuse_changed(graph)
        self._times += 1
        if self._times > _MOST_COMPILED:
            raise RuntimeError("compiled too often")
        indices = self._indices(graph, inputs)
        options: dict[str, Any] = {
            "fallback_random": True,
            "joint_custom_pre_pass": KeepZeroProducts(),
        }
        compiled: Any = compile_fx(graph, inputs, config_patches=options)
        return checked(compiled, indices)


def _converting(loss: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    def converted(output: Tensor, *targets: Any) -> Tensor:
        return loss(output.to(dtype), *targets)

    return converted


def _unpadded(memory: Mapping[int, int], tensor: Tensor) -> Tensor:
    """The tensor without gaps between its elements: a loss may flatten it.

    Tensors that share their memory, by the counts in `memory`, are the model's own views.
    """
    if not _is_strided(tensor) or tensor.is_contiguous():
        return tensor
    if memory[tensor.untyped_storage()._cdata] > 1:
        return tensor
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    gaps = 1 + sum((size - 1) * stride for size, stride in steps) > tensor.numel()
    return tensor.contiguous() if gaps else tensor


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _reads_environment(loss: Callable[..., Tensor]) -> bool:
    """Whether it reads environment variables, whose later appearance Dynamo does not notice."""
    read = Reads()
    read.loss(loss)
    for module in [each for tree in read.modules for each in tree.modules()]:
        read.forward(module)
    return read.reads_environment


@contextmanager
def _at_first() -> Iterator[None]:
    """Refuses cached functions, and silences a warning of Dynamo.

    Dynamo reads `grad` of the model's output, which is not a leaf.
    """
    from steadytorch.workload.compiler_faults import refusing_caches

    with refusing_caches():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield
