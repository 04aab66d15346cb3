"""The default training step for named models: cross-entropy on random targets, with SGD."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from steadytorch.errors import UsageError
from steadytorch.workload.workload import Workload

# Small, so that weights do not overflow in thousands of steps towards random targets.
sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


class CrossEntropy(nn.Module):
    """Cross-entropy of a model's output against fixed targets.

    The targets are a buffer of this module, so that `Workload.to` moves them with the model.

    Args:
        targets: int64 class indices, one per sample (N,), per pixel (N, H, W) or per token (N, T).
        classes_last: whether the output is (N, T, classes) rather than (N, classes, ...).
    """

    targets: torch.Tensor

    def __init__(self, targets: torch.Tensor, classes_last: bool = False) -> None:
        super().__init__()
        self.register_buffer("targets", targets)
        self.classes_last = classes_last

    def forward(self, output: Any) -> torch.Tensor:
        """Map the model's output to a scalar loss."""
        logits = logits_of(output)
        if self.classes_last:
            return functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())
        return functional.cross_entropy(logits, self.targets)


def logits_of(output: Any) -> torch.Tensor:
    """The class scores in a model's output: itself, its `logits` or `out`, or its first element.

    Raises:
        TypeError: the output holds no class scores in any of these places.
    """
    if isinstance(output, Mapping):
        output = output.get("logits", output.get("out"))
    elif isinstance(output, tuple | list):  # auxiliary classifiers follow the main one
        output = getattr(output, "logits", output[0] if output else None)
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"an output of type {type(output).__name__} holds no class scores")
    return output


def supervised(workload: Workload, generator: torch.Generator) -> Workload:
    """Builds a training workload for a model that maps its inputs to class scores.

    Args:
        workload: an inference workload on the CPU. Integer inputs are treated as tokens, with
            scores of shape (N, T, classes); others as images or clips, with scores
            (N, classes, ...).
        generator: CPU generator of the targets.

    Returns:
        A workload with the model in train mode, `CrossEntropy` and SGD.

    Raises:
        UsageError: the model fails on its inputs, or does not return class scores.
    """
    model, inputs = workload.model, workload.inputs
    classes_last = not inputs[0].is_floating_point()
    model.eval()
    try:
        # One sample is enough: the other sizes do not depend on the batch.
        with torch.no_grad():
            logits = logits_of(model(*(value[:1] for value in inputs), **workload.kwargs))
        sizes = logits.shape[1:-1] if classes_last else logits.shape[2:]
        classes = logits.shape[-1 if classes_last else 1]
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{workload.name} cannot be trained on inputs {workload.signature()}: {reason}; write "
            "a factory that returns Workload.training(model, inputs, loss, optimizer)"
        ) from error
    shape = (len(inputs[0]), *sizes)
    targets = torch.randint(classes, shape, generator=generator)
    loss = CrossEntropy(targets, classes_last)
    return Workload.training(
        model.train(), inputs, loss, sgd, kwargs=workload.kwargs, name=workload.name
    )
