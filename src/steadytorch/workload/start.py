"""Saving and restoring the state of a training workload.

Each training step changes the weights. Training steps that are compared or timed must start from
the same weights.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from steadytorch.workload.workload import Workload


def with_optimizer(workload: Workload) -> Workload:
    """The training workload with its optimizer created, and optimizer state on the model's device.

    Args:
        workload: a training workload; inference workloads are returned unchanged.
    """
    if workload.training_step is None:
        return workload
    optimizer = workload.training_step.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(workload.untouched.parameters())
    elif optimizer.state:
        # `Workload.to` moves only the weights; loading the state moves it to their device.
        optimizer.load_state_dict(optimizer.state_dict())
    return replace(workload, training_step=replace(workload.training_step, optimizer=optimizer))


def optimizer_of(workload: Workload) -> torch.optim.Optimizer:
    """The optimizer of a workload that `with_optimizer` returned."""
    assert workload.training_step is not None
    optimizer = workload.training_step.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def modules_of(workload: Workload) -> dict[str, nn.Module]:
    """The modules of a training step by name prefix: "" for the model, "loss:" for the loss."""
    loss = None if workload.training_step is None else workload.training_step.loss
    pairs = (("", workload.untouched), ("loss:", loss))
    return {prefix: module for prefix, module in pairs if isinstance(module, nn.Module)}


def parameters_of(workload: Workload) -> dict[str, Tensor]:
    """The parameters of model, loss and optimizer by name, each tensor once.

    Args:
        workload: as returned by `with_optimizer`.
    """
    named = [
        (prefix + name, parameter)
        for prefix, module in modules_of(workload).items()
        for name, parameter in module.named_parameters()
    ]
    for i, group in enumerate(optimizer_of(workload).param_groups):
        named.extend((f"optimizer.{i}.{j}", tensor) for j, tensor in enumerate(group["params"]))
    first = {id(tensor): name for name, tensor in reversed(named)}
    return {name: tensor for name, tensor in named if first[id(tensor)] == name}


def buffers_of(workload: Workload) -> dict[str, Tensor]:
    """The currently registered buffers of model and loss, by name."""
    return {
        prefix + name: buffer
        for prefix, module in modules_of(workload).items()
        for name, buffer in module.named_buffers()
    }


class Start:
    """Weights, buffers and optimizer state of a training workload, copied to host memory.

    Plain attributes of modules and random states are not copied. For an inference workload,
    nothing is copied.

    Args:
        workload: as returned by `with_optimizer`.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        if not workload.is_training:
            return
        self._parameters = [(tensor, _kept(tensor)) for tensor in parameters_of(workload).values()]
        self._buffers = {name: (b.device, _kept(b)) for name, b in buffers_of(workload).items()}
        self._state = copy.deepcopy(optimizer_of(workload).state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        """Restores weights, buffers and optimizer state in place, and drops gradients.

        A buffer is replaced only if it was removed, or its shape or dtype has changed.
        """
        if not self._workload.is_training:
            return
        for parameter, kept in self._parameters:
            parameter.grad = None
            parameter.copy_(kept)
        now = buffers_of(self._workload)
        for name, (device, kept) in self._buffers.items():
            found = now.get(name)
            if found is not None and (found.shape, found.dtype) == (kept.shape, kept.dtype):
                found.copy_(kept)
            else:
                self._replace(name, kept.to(device, copy=True))
        # The optimizer keeps the loaded state, so give it a copy.
        optimizer_of(self._workload).load_state_dict(copy.deepcopy(self._state))

    def _replace(self, name: str, buffer: Tensor) -> None:
        modules = modules_of(self._workload)
        prefix = max((p for p in modules if name.startswith(p)), key=len)
        path, _, leaf = name.removeprefix(prefix).rpartition(".")
        setattr(modules[prefix].get_submodule(path), leaf, buffer)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
