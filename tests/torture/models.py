"""Models of the torture suite: what they compute, return, write to, and keep."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Pair = namedtuple("Pair", "first second")


class Body(nn.Module):
    """A convolution, a batch norm and a head: what most transforms apply to."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 6)
        self.scale, self.table, self.rows = (
            torch.ones(8, 1, 1),
            {"k": torch.ones(1)},
            [torch.ones(1)],
        )
        nn.init.uniform_(self.norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x))) * self.scale * self.table["k"]


class Depthwise(Body):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardswish(self.deep(super().forward(x))) * self.rows[0]


class Attention(Body):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        q, k, v = self.mix(y.flatten(2).transpose(1, 2)).chunk(3, -1)
        z = F.scaled_dot_product_attention(q, k, v)
        return z.transpose(1, 2).reshape(y.shape).contiguous()


class Tied(Body):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 6)
        self.again.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + (self.again(y.mean((2, 3))) @ self.head.weight)[:, :, None, None]


BODIES: dict[str, type[Body]] = {
    "body": Body,
    "depthwise": Depthwise,
    "attention": Attention,
    "tied": Tied,
}

OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tensor": lambda y, h: y,
    "tuple": lambda y, h: (y, h),
    "list": lambda y, h: [h, y],
    "dict": lambda y, h: {"y": y, "h": h},
    "ordered": lambda y, h: OrderedDict(h=h, y=y),
    "named": lambda y, h: Pair(y, h),
    "nested": lambda y, h: {"a": (y, [h, {"b": y.sum()}])},
    "structseq": lambda y, h: torch.max(h, 1),
    "constants": lambda y, h: (h, 3, "text", None, True, 0.5),
    "size": lambda y, h: (h, y.shape),
    "slice": lambda y, h: (h[:, 0], h[1:]),
    "expanded": lambda y, h: h[:, :1].expand(-1, 4),
    "transposed": lambda y, h: h.t(),
    "number": lambda y, h: (h.sum(), h.mean().detach()),
}

Written = Callable[[Any, torch.Tensor], None]
WRITES: dict[str, tuple[Callable[[], Any], Written]] = {
    "nothing": (lambda: None, lambda box, y: None),
    "entry added": (lambda: {"a": 1}, lambda box, y: box.update(feature=y)),
    "entry replaced": (lambda: {"a": torch.ones(2)}, lambda box, y: box.update(a=y + 1)),
    "entry deleted": (lambda: {"a": 1, "b": 2}, lambda box, y: box.pop("a")),
    "appended": (lambda: [1], lambda box, y: box.append(y.mean())),
    "cleared": (lambda: [1, 2], lambda box, y: box.clear()),
    "nested": (lambda: {"in": [[]]}, lambda box, y: box["in"][0].append((y, y.sum()))),
    "text": (list, lambda box, y: box.append(f"shape {tuple(y.shape)}")),
}


class Stop(Exception):  # noqa: N818 - named as such things are
    """Ends a forward pass on purpose, as early stopping does."""


class Deadline(Exception):  # noqa: N818 - likewise
    """Raised by a handler of a signal, as task queues do when time is over."""


def _meet_deadline(number: int, frame: Any) -> None:
    raise Deadline("time is over")


class Caller:
    """What the hooks of a model close over; nothing of the model leads to it but its hooks.

    Attributes:
        collected: by a hook.
        by: what a hook multiplies with.
        raises: whether a hook ends the pass.
    """

    def __init__(self) -> None:
        self.collected: list[torch.Tensor] = []
        self.by = 1.0
        self.raises = False


Hook = Callable[[Caller], Callable[..., Any]]


def _collecting(caller: Caller) -> Callable[..., Any]:
    return lambda module, given, result: caller.collected.append(result.detach().clone())


def _steering(caller: Caller) -> Callable[..., Any]:
    return lambda module, given, result: result * caller.by


def _stopping(caller: Caller) -> Callable[..., Any]:
    def stop(module: nn.Module, given: Any, result: Any) -> None:
        if caller.raises:
            raise Stop("enough")

    return stop


def _expiring(caller: Caller) -> Callable[..., Any]:
    def expire(module: nn.Module, given: Any, result: Any) -> None:
        if caller.raises:  # once: what answers in the place of the call must not hide it
            caller.raises = False
            before = signal.signal(signal.SIGUSR1, _meet_deadline)
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            finally:
                signal.signal(signal.SIGUSR1, before)

    return expire


HOOKS: dict[str, Hook] = {
    "collecting": _collecting,
    "steering": _steering,
    "stopping": _stopping,
    "expiring": _expiring,
}


class Case(nn.Module):
    """A body whose output, writes and hooks are chosen.

    Args:
        body: of `BODIES`.
        output: of `OUTPUTS`.
        write: of `WRITES`.
        caller: what the hook closes over.
        hook: of `HOOKS`, on a layer of the body; None for none.
    """

    def __init__(
        self,
        body: str,
        output: str,
        write: str,
        caller: Caller | None = None,
        hook: str | None = None,
    ) -> None:
        super().__init__()
        self.body = BODIES[body]()
        self.output, self.write = output, write
        if hook is not None and caller is not None:
            self.body.norm.register_forward_hook(HOOKS[hook](caller))

    def forward(self, x: torch.Tensor, box: Any = None, times: float = 1.0) -> Any:
        y = self.body(x) * times
        WRITES[self.write][1](box, y)
        return OUTPUTS[self.output](y, self.body.head(y.mean((2, 3))))
