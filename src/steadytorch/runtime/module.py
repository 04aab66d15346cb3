"""The module that production calls: a tuned executor per signature, or the untouched model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from operator import attrgetter
from threading import RLock
from typing import Any

import torch
from torch import nn

from steadytorch import transforms
from steadytorch.errors import SteadyError, UsageError
from steadytorch.transforms.base import Candidate, applied_in_order
from steadytorch.workload.signature import Signature, signature, tensors_of
from steadytorch.workload.workload import Workload

_log = logging.getLogger("steadytorch")
_version_of = attrgetter("_version")

Resolver = Callable[[Signature], Candidate | None]
"""Says which candidate serves a signature; None for the untouched model."""


class TunedModule(nn.Module):
    """A model that runs tuned where a plan exists for the inputs, and untouched everywhere else.

    It has the call signature, attributes, parameters and state dict of the model it wraps. No fault
    of an executor reaches the caller: the untouched model answers instead, and `report` says why.
    An inference plan returns outputs without gradient history.

    Args:
        model: the untouched model; it is called, never changed.
        resolve: which candidate serves a signature.
        untouched_because: set if nothing may be served tuned, with the reason.
    """

    def __init__(
        self, model: nn.Module, resolve: Resolver, untouched_because: str | None = None
    ) -> None:
        super().__init__()
        state = self.__dict__  # past nn.Module, which would register the model as a child
        state["_model"] = model
        state["_resolve"] = resolve
        state["_executors"] = {}
        state["_stack"] = ExitStack()
        state["_weights"] = _Weights(model)
        state["_trained_like"] = model.training
        state["_calls"] = Counter()
        state["_lock"] = RLock()
        state["_off"] = untouched_because
        self.training = model.training
        if untouched_because is not None:
            _log.warning("running untouched: %s", untouched_because)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the tuned executor for these inputs, or the untouched model."""
        if self._off is not None:
            return self._untouched(self._off, args, kwargs)
        key = _quick_key(args, kwargs)
        executor = self._executors.get(key, _UNSEEN) if key is not None else None
        if executor is _UNSEEN:
            executor = self._first_sight(key, args, kwargs)
        if executor is None:
            return self._untouched("no plan for these inputs", args, kwargs)
        reason = self._must_not_serve(args)
        if reason is not None:
            return self._untouched(reason, args, kwargs)
        try:
            result = executor(*args, **kwargs)
        except Exception as error:  # whatever it is, the caller's answer is the untouched model's
            self._disable(key, error)
            return self._untouched("the tuned executor failed", args, kwargs)
        # Looked at after launching, so that a GPU works meanwhile; a stale result is thrown away.
        if self._weights.changed():
            self._switch_off("weights changed since the plan was applied; apply it again")
            return self._untouched("weights changed", args, kwargs)
        self._calls["tuned"] += 1
        return result

    def report(self) -> dict[str, int]:
        """How many calls ran tuned, and how many untouched for which reason."""
        return dict(self._calls)

    def close(self) -> None:
        """Frees the executors; the untouched model serves from then on."""
        with self._lock:
            self.__dict__["_off"] = "closed"
            self._executors.clear()
            self._stack.close()

    # -- executors ------------------------------------------------------------------------------

    def _first_sight(self, key: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """Builds the executor for a signature, once, whichever thread comes first."""
        with self._lock:
            if key in self._executors:
                return self._executors[key]
            executor = None
            try:
                candidate = self._resolve(signature(args, kwargs))
                if candidate is not None:
                    executor = self._build(candidate, args, kwargs)
            except Exception as error:
                _log.warning("running untouched: the plan could not be applied: %s", _line(error))
            self._executors[key] = executor
            return executor

    def _build(self, candidate: Candidate, args: Any, kwargs: Any) -> Callable[..., Any]:
        workload = Workload(self._model, args, kwargs)
        context = applied_in_order([transforms.create(spec) for spec in candidate], workload)
        model = self._stack.enter_context(context).model
        self._weights.remember()
        return model

    def _disable(self, key: Any, error: Exception) -> None:
        _log.warning("running untouched from now on: the tuned executor failed: %s", _line(error))
        with self._lock:
            self._executors[key] = None

    def _switch_off(self, reason: str) -> None:
        _log.warning("running untouched: %s", reason)
        self.__dict__["_off"] = reason

    def _must_not_serve(self, args: tuple[Any, ...]) -> str | None:
        if self._model.training != self._trained_like:
            return "the model was switched between train and eval"
        if torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in args
        ):
            return "gradients of the inputs are needed"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "called under autocast"
        return None

    def _untouched(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._calls[f"untouched: {reason}"] += 1
        return self._model(*args, **kwargs)

    # -- standing in for the model --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Whatever is not the wrapper's own is the model's."""
        return getattr(self.__dict__["_model"], name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Generator[tuple[str, nn.Module]]:
        """Those of the model; parameters and buffers follow from it."""
        yield from self._model.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Those of the model."""
        return self._model.named_children()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads into the model; executors built before are not used again."""
        self._switch_off("weights were loaded after the plan was applied; apply it again")
        return self._model.load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> TunedModule:
        """Switches the model; a plan serves only the mode that it was applied in."""
        self._model.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> TunedModule:
        self._switch_off(
            "the model was moved or converted after the plan was applied; apply it again"
        )
        self._model._apply(fn, recurse)
        return self


_UNSEEN: Any = object()


def _quick_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A cheap stand-in for the signature: equal keys imply equal signatures. None if keyless."""
    if not kwargs and all(type(a) is torch.Tensor for a in args):
        return tuple([(a.shape, a.stride(), a.dtype, a.device) for a in args])
    try:
        return signature(args, kwargs), tuple(t.device for t in tensors_of((args, kwargs)))
    except UsageError:
        return None


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return first if isinstance(error, SteadyError) else f"{type(error).__name__}: {first}"


class _Weights:
    """Tells whether parameters or buffers changed since they were last remembered.

    In-place edits (optimizer steps, `load_state_dict`, `copy_`) raise a tensor's version counter.
    Moves and conversions replace storage without raising it, and always of the whole module, so the
    addresses of all tensors are compared only through their first and last.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.remember()

    def remember(self) -> None:
        """Takes the present state as the unchanged one."""
        found = [*self._model.parameters(), *self._model.buffers()]
        self._tensors = [tensor for tensor in found if not tensor.is_inference()]
        self._ends = [self._tensors[0], self._tensors[-1]] if self._tensors else []
        self._versions = sum(map(_version_of, self._tensors))
        self._addresses = [tensor.data_ptr() for tensor in self._ends]

    def changed(self) -> bool:
        """Whether any tensor was written to or moved since."""
        if sum(map(_version_of, self._tensors)) != self._versions:
            return True
        return [tensor.data_ptr() for tensor in self._ends] != self._addresses
