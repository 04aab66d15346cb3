"""The module that production calls: a tuned executor per signature, or the untouched model."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from threading import Lock, RLock
from typing import Any

import torch
from torch import nn

from steadytorch import transforms
from steadytorch.errors import SteadyError, UsageError
from steadytorch.runtime.weights import Weights
from steadytorch.transforms.base import Candidate, applied_in_order
from steadytorch.workload.signature import Signature, signature, tensors_of
from steadytorch.workload.workload import Workload

_log = logging.getLogger("steadytorch")
_MOST_REMEMBERED = 1000
"""Signatures without a plan that are kept in mind."""

Executor = Callable[..., Any]

Resolver = Callable[[Signature], Candidate | None]
"""Says which candidate serves a signature; None for the untouched model."""


class TunedModule(nn.Module):
    """A model that runs tuned where a plan exists for the inputs, and untouched everywhere else.

    It has the call signature, attributes, parameters and state dict of the model it wraps; only
    `report` and `close` are its own. No fault of an executor reaches the caller: the untouched
    model answers instead, and `report` says why. Tuned outputs have no gradient history.

    Weights that are written to, moved or replaced after the plan was applied end its use, and so do
    submodules that are replaced or switched between train and eval. Out of sight are writes through
    `.data` and to inference tensors, and other attributes of submodules: apply the plan after them.

    A deep copy serves the plan too, with executors of its own. One that is pickled serves untouched
    where it is opened: what the plan needs was not checked there.

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
        del state["training"]  # the model's own shows through
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[registry] = getattr(model, registry)
        state["_model"] = model
        state["_resolve"] = resolve
        state["_executors"] = {}
        state["_stack"] = ExitStack()
        state["_weights"] = Weights(model)
        state["_built"] = False
        state["_trained_like"] = model.training
        state["_calls"] = Counter()
        state["_lock"] = RLock()
        state["_counting"] = Lock()
        state["_off"] = untouched_because
        if untouched_because is not None:
            _log.warning("running untouched: %s", untouched_because)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the tuned executor for these inputs, or the untouched model."""
        reason = self._off or self._must_not_serve(args, kwargs)
        if reason is not None:
            return self._untouched(reason, args, kwargs)
        key = _quick_key(args, kwargs)
        executor = self._executors.get(key)
        fresh = executor is None
        if executor is None:
            executor = self._first_sight(key, args, kwargs)
        if isinstance(executor, str):
            return self._untouched(executor, args, kwargs)
        try:
            with torch.no_grad():
                result = executor(*args, **kwargs)
        except Exception as error:
            # Where the untouched model raises as well, it is the inputs that are at fault.
            answer = self._untouched("the tuned executor failed", args, kwargs)
            self._disable(key, error)
            return answer
        # Looked at after launching, so that a GPU works meanwhile; a stale result is thrown away.
        if self._weights.changed():
            if not fresh:
                self._switch_off("weights changed since the plan was applied; apply it again")
                return self._untouched("weights changed", args, kwargs)
            # The call itself did that, and must not be made twice.
            self._switch_off("the model writes to its own buffers when called")
        self._count("tuned")
        return result

    def report(self) -> dict[str, int]:
        """How many calls ran tuned, and how many untouched for which reason."""
        return dict(self._calls)

    def close(self) -> None:
        """Frees the executors; the untouched model serves from then on."""
        with self._lock:
            self.__dict__["_off"] = "closed"
            self._executors.clear()
            try:
                self._stack.close()
            except Exception as error:
                _log.warning("a plan was not undone cleanly: %s", _line(error))

    # -- executors ------------------------------------------------------------------------------

    def _first_sight(self, key: Any, args: Any, kwargs: Any) -> Executor | str:
        """Builds the executor for a signature, once, whichever thread comes first."""
        if key is None:
            return "these inputs have no signature"
        with self._lock:
            if self._off is not None:
                return self._off
            known = self._executors.get(key)
            if known is not None:
                return known
            try:
                found = self._executor_for(args, kwargs)
            except Exception as error:
                _log.warning("running untouched: the plan could not be applied: %s", _line(error))
                found = "the plan could not be applied"
            # Inputs that never repeat must not fill the memory.
            if not isinstance(found, str) or len(self._executors) < _MOST_REMEMBERED:
                self._executors[key] = found
            return found

    def _executor_for(self, args: Any, kwargs: Any) -> Executor | str:
        candidate = self._resolve(signature(args, kwargs))
        if candidate is None:
            return "no plan for these inputs"
        if not candidate:
            return "nothing was faster than the untouched model"
        if len(candidate) > len(transforms.names()) or transforms.conflict(candidate):
            raise UsageError("its transforms cannot be combined")
        if not self._built:
            self._weights.remember()
        elif self._weights.changed():  # to take these as unchanged would hide it from the others
            return "weights changed"
        workload = Workload(self._model, args, kwargs)
        context = applied_in_order([transforms.create(spec) for spec in candidate], workload)
        model = self._stack.enter_context(context).model
        self.__dict__["_built"] = True
        return model

    def _disable(self, key: Any, error: Exception) -> None:
        _log.warning("running untouched from now on: the tuned executor failed: %s", _line(error))
        with self._lock:
            self._executors[key] = "the tuned executor failed"

    def _switch_off(self, reason: str) -> None:
        _log.warning("running untouched: %s", reason)
        self.__dict__["_off"] = reason

    def _must_not_serve(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        if self._model.training != self._trained_like:
            return "the model was switched between train and eval"
        if torch.is_grad_enabled() and _needs_gradient(args, kwargs):
            return "gradients of the inputs are needed"
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            return "called under autocast"
        return None

    def _untouched(self, reason: str, args: Any, kwargs: Any) -> Any:
        self._count(f"untouched: {reason}")
        return self._model(*args, **kwargs)

    def _count(self, outcome: str) -> None:
        with self._counting:
            self._calls[outcome] += 1

    # -- standing in for the model --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Whatever is not the wrapper's own is the model's."""
        model = self.__dict__.get("_model")
        if model is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets it on the model, whose numbers it may change, unless it is the wrapper's own."""
        if name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
            return
        setattr(self._model, name, value)
        if name != "training":
            self._switch_off(f"{name} was set after the plan was applied; apply it again")

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedModule:
        return TunedModule(copy.deepcopy(self._model, memo), self._resolve, self._off)

    def __reduce__(self) -> tuple[Any, ...]:
        return TunedModule, (self._model, _nothing, "it was copied; apply the plan to the copy")

    def named_modules(self, *args: Any, **kwargs: Any) -> Generator[tuple[str, nn.Module]]:
        """Those of the model; parameters and buffers follow from it."""
        yield from self._model.named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], Any]) -> TunedModule:
        """Calls a function with each module of the model; executors built before end with it."""
        self._switch_off("a function was applied to the model; apply the plan after that")
        self._model.apply(fn)
        return self

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
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> TunedModule:
        self._switch_off(
            "the model was moved or converted after the plan was applied; apply it again"
        )
        self._model._apply(fn, recurse)
        return self


def _nothing(signature: Signature) -> Candidate | None:
    """Has a plan for no inputs."""
    return None


def _quick_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A cheap stand-in for the signature: equal keys imply equal signatures. None if keyless."""
    try:
        if not kwargs and all(type(a) is torch.Tensor for a in args):
            return tuple([(a.shape, a.stride(), a.dtype, a.device) for a in args])
        return signature(args, kwargs), tuple([t.device for t in tensors_of((args, kwargs))])
    except Exception:  # tensors without strides, objects of any kind
        return None


def _needs_gradient(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if kwargs or not all(type(a) is torch.Tensor for a in args):
        args = tuple(tensors_of((args, dict(kwargs))))
    return any(a.requires_grad for a in args)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    # Compilers announce the cause in one line and name it in the next.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    first = "".join(c if c.isprintable() else "?" for c in text)[:300]
    return first if isinstance(error, SteadyError) else f"{type(error).__name__}: {first}"
