"""What callers do with a model between its calls, the untouched one and the tuned one alike."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .models import Caller, Case

Handle = Any
"""What the caller calls: a model, or a tuned module for it."""
Action = Callable[[Handle, Case, Caller], Handle]


def _stepping(kind: Any, **settings: Any) -> Action:
    def step(handle: Handle, model: Case, caller: Caller) -> Handle:
        optimizer = kind(model.parameters(), lr=0.05, **settings)
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
        optimizer.step()
        model.zero_grad()
        return handle

    return step


def _on_model(change: Callable[[Case], Any]) -> Action:
    def act(handle: Handle, model: Case, caller: Caller) -> Handle:
        with torch.no_grad():
            change(model)
        return handle

    return act


def _on_handle(change: Callable[[Handle], Any]) -> Action:
    def act(handle: Handle, model: Case, caller: Caller) -> Handle:
        change(handle)
        return handle

    return act


def _steered(handle: Handle, model: Case, caller: Caller) -> Handle:
    caller.by *= 2
    return handle


def _raising(handle: Handle, model: Case, caller: Caller) -> Handle:
    caller.raises = not caller.raises
    return handle


def _saved_and_loaded(handle: Handle) -> None:
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    handle.load_state_dict(torch.load(file))


def _averaged(model: Case) -> None:
    other = copy.deepcopy(model)
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        own.data.copy_(own.data.lerp(new.data + 1, 0.1))


def _statistics(model: Case) -> None:
    norm, generator = model.body.norm, torch.Generator().manual_seed(3)
    x = torch.randn(4, 8, 2, 2, generator=generator).to(norm.running_mean.device)
    F.batch_norm(x, norm.running_mean, norm.running_var, training=True)


def _with_other_head(model: Case) -> None:
    model.body.head = copy.deepcopy(model.body.head)
    model.body.head.bias.add_(1)


def _reloaded(model: Case) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _other(model: Case) -> dict[str, torch.Tensor]:
    return {n: t * 1.5 if t.is_floating_point() else t for n, t in model.state_dict().items()}


def _doubling(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor:
    return 2 * result


HAS_CUDA = torch.cuda.is_available()

CHANGES: dict[str, Action] = {
    "SGD": _stepping(torch.optim.SGD),
    "SGD fused": _stepping(torch.optim.SGD, fused=True),
    "Adam foreach": _stepping(torch.optim.Adam, foreach=True),
    "Adam fused": _stepping(torch.optim.Adam, fused=True),
    "AdamW fused": _stepping(torch.optim.AdamW, fused=True),
    # On CUDA there is no such kernel.
    "Adagrad fused": _stepping(torch.optim.Adagrad, fused=not HAS_CUDA),
    "copy_": _on_model(lambda m: m.body.head.weight.copy_(m.body.head.weight * 2)),
    "data copy_": _on_model(lambda m: m.body.head.weight.data.copy_(m.body.head.weight * 2)),
    "data +=": _on_model(lambda m: m.body.convolution.weight.data.add_(0.1)),
    "data replaced": _on_model(lambda m: setattr(m.body.head.bias, "data", m.body.head.bias + 1)),
    "average": _on_model(_averaged),
    "foreach": _on_model(lambda m: torch._foreach_add_([p.data for p in m.parameters()], 0.1)),
    "statistics": _on_model(_statistics),
    "plain tensor": _on_model(lambda m: m.body.scale.mul_(3)),
    "plain tensor's data": _on_model(lambda m: m.body.scale.data.mul_(3)),
    "tensor in a dict": _on_model(lambda m: m.body.table["k"].mul_(3)),
    "tensor in a list": _on_model(lambda m: m.body.rows[0].mul_(3)),
    "plain tensor replaced": _on_model(lambda m: setattr(m.body, "scale", m.body.scale * 2)),
    "entry replaced": _on_model(lambda m: m.body.table.update(k=m.body.table["k"] * 2)),
    "layer replaced": _on_model(_with_other_head),
    "loads others": _on_handle(lambda h: h.load_state_dict(_other(h))),
    "hook": _on_model(lambda m: m.body.head.register_forward_hook(_doubling)),
}
"""After these, answers of before are wrong."""

NOTHINGS: dict[str, Action] = {
    "nothing": lambda handle, model, caller: handle,
    "to": _on_handle(lambda h: h.to(next(h.parameters()).device)),
    "float": _on_handle(lambda h: h.float()),
    "eval": _on_handle(lambda h: h.eval()),
    "train and eval": _on_handle(lambda h: h.train().eval()),
    "loads its own": _on_handle(lambda h: h.load_state_dict(_reloaded(h))),
    "zero_grad": _on_handle(lambda h: h.zero_grad()),
    "requires_grad_": _on_handle(lambda h: h.requires_grad_(True)),
    "parent's to": _on_handle(lambda h: torch.nn.Sequential(h).to(next(h.parameters()).device)),
    "state saved and loaded": _on_handle(_saved_and_loaded),
}
"""These change no answer, and end no plan."""

OTHERS: dict[str, Action] = {
    "double and back": _on_handle(lambda h: h.double().float()),
    "steer": _steered,
    "raise": _raising,
    "deepcopy": lambda handle, model, caller: copy.deepcopy(handle),
    "pickle": lambda handle, model, caller: pickle.loads(pickle.dumps(handle)),
}
"""These change what hooks do, what is called, or where weights are."""

ACTIONS = {**CHANGES, **NOTHINGS, **OTHERS}
