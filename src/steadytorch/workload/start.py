"""Where a training workload stands, kept so that it can begin there again.

Every step moves the weights. What is to be compared, or timed again and again, has to start from
the same ones.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from steadytorch.workload.workload import Workload


def with_optimizer(workload: Workload) -> Workload:
    """The same training workload with its optimizer made, its state where the weights are.

    Args:
        workload: one that trains; others are returned as they are.
    """
    if workload.training_step is None:
        return workload
    optimizer = workload.training_step.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(workload.untouched.parameters())
    elif optimizer.state:
        # `Workload.to` moves the weights alone; loading moves the state to where they are.
        optimizer.load_state_dict(optimizer.state_dict())
    return replace(workload, training_step=replace(workload.training_step, optimizer=optimizer))


def optimizer_of(workload: Workload) -> torch.optim.Optimizer:
    """The optimizer of what `with_optimizer` returned."""
    assert workload.training_step is not None
    optimizer = workload.training_step.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def modules_of(workload: Workload) -> dict[str, nn.Module]:
    """The modules of a step by the prefix of their names: the model's "", the loss's "loss:"."""
    loss = None if workload.training_step is None else workload.training_step.loss
    pairs = (("", workload.untouched), ("loss:", loss))
    return {prefix: module for prefix, module in pairs if isinstance(module, nn.Module)}


def parameters_of(workload: Workload) -> dict[str, Tensor]:
    """What a step may update, each tensor once: parameters of model, loss and optimizer, by name.

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
    """The buffers of model and loss, as they are registered now, by name."""
    return {
        prefix + name: buffer
        for prefix, module in modules_of(workload).items()
        for name, buffer in module.named_buffers()
    }


class Start:
    """Weights, buffers and optimizer of a training workload, copied to the host's memory.

    Plain attributes of modules, and random numbers, are not part of it. Of inference nothing is
    kept: it moves nothing.

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
        """Puts everything back, in place; gradients are dropped.

        Only a buffer that the model has replaced by one of another form is replaced again.
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
        # What it is given becomes the optimizer's own.
        optimizer_of(self._workload).load_state_dict(copy.deepcopy(self._state))

    def _replace(self, name: str, buffer: Tensor) -> None:
        modules = modules_of(self._workload)
        prefix = max((p for p in modules if name.startswith(p)), key=len)
        path, _, leaf = name.removeprefix(prefix).rpartition(".")
        setattr(modules[prefix].get_submodule(path), leaf, buffer)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
