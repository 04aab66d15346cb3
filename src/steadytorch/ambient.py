"""Reads and restores process-wide PyTorch settings, and finds active function modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch._C import (
    _get_deterministic_algorithms,
    _get_fp32_precision_getter,
    _get_function_stack_at,
    _len_torch_function_stack,
)
from torch.utils._device import DeviceContext

from steadytorch.errors import UsageError

UNREADABLE = "unreadable"
"""Value of a setting that PyTorch refuses to read or that this build lacks."""


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    parse: Callable[[str], Any]


def _boolean(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(text)
    return text == "True"


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(text)
    return found


def _attribute(owner: Any, name: str, parse: Callable[[str], Any]) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), parse)


@cache
def _settings() -> dict[str, _Setting]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    # Written in this order: setting an early one overwrites later ones.
    settings = {
        "float32_matmul_precision": _Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, str
        ),
        "fp32_precision": _attribute(torch.backends, "fp32_precision", str),
        "cudnn.fp32_precision": _attribute(cudnn, "fp32_precision", str),
        "cuda.matmul.fp32_precision": _attribute(cuda.matmul, "fp32_precision", str),
        "cudnn.conv.fp32_precision": _attribute(cudnn.conv, "fp32_precision", str),
        "cudnn.rnn.fp32_precision": _attribute(cudnn.rnn, "fp32_precision", str),
        "mkldnn.matmul.fp32_precision": _attribute(mkldnn.matmul, "fp32_precision", str),
        "cudnn.enabled": _attribute(cudnn, "enabled", _boolean),
        "cudnn.benchmark": _attribute(cudnn, "benchmark", _boolean),
        "cudnn.benchmark_limit": _attribute(cudnn, "benchmark_limit", int),
        "cudnn.deterministic": _attribute(cudnn, "deterministic", _boolean),
    }
    for backend in ("flash", "mem_efficient", "math", "cudnn"):
        settings[f"sdp.{backend}"] = _Setting(
            getattr(cuda, f"{backend}_sdp_enabled"),
            getattr(cuda, f"enable_{backend}_sdp"),
            _boolean,
        )
    # 0: all operations allowed; 1: nondeterministic ones warn; 2: they raise.
    settings["deterministic_algorithms"] = _Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, int
    )
    settings["num_threads"] = _Setting(torch.get_num_threads, torch.set_num_threads, int)
    settings["default_dtype"] = _Setting(torch.get_default_dtype, torch.set_default_dtype, _dtype)
    return settings


def ambient() -> dict[str, str]:
    """Return the process-wide PyTorch settings that transforms change, as text.

    Returns:
        Maps each setting to its value, or to `UNREADABLE`: PyTorch refuses to read some precisions
        after its old and new interfaces were mixed.
    """
    return {name: _read(setting) for name, setting in _settings().items()}


def _read(setting: _Setting) -> str:
    try:
        value = setting.read()
    except RuntimeError:
        return UNREADABLE
    return UNREADABLE if value is None else str(value)


def set_ambient(values: Mapping[str, str]) -> None:
    """Apply the settings that `ambient` returned in another process.

    Call `set_ambient` in a fresh process only, because the old values are not restored. A setting
    that is `UNREADABLE` in `values` or in this process stays unchanged.

    Raises:
        UsageError: a setting or its value is unknown. Settings before it have been applied.
    """
    settings = _settings()
    unknown = sorted(values.keys() - settings.keys())
    if unknown:
        raise UsageError(f"unknown process setting {unknown[0]!r}: use {', '.join(settings)}")
    for name, setting in settings.items():
        text = values.get(name, UNREADABLE)
        if text != UNREADABLE and _read(setting) not in (text, UNREADABLE):
            _write(name, setting, text)


def _write(name: str, setting: _Setting, text: str) -> None:
    try:
        setting.write(setting.parse(text))
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"cannot set process setting {name} to {text!r}: {error}") from None


class flags:  # noqa: N801 - used like a function, in `with flags(...)`
    """Context that sets attributes `(owner, name, value)` and restores the old values on exit.

    `flags` wraps every model call, so it is a class: a generator-based context manager takes three
    times as long.
    """

    __slots__ = ("_found", "_settings")

    def __init__(self, *settings: tuple[Any, str, Any]) -> None:
        self._settings = settings
        self._found: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        try:
            for owner, name, value in self._settings:
                found = getattr(owner, name)
                if found != value:
                    setattr(owner, name, value)
                    self._found.append((owner, name, found))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            while self._found:
                setattr(*self._found.pop())
        finally:
            if self._found:  # one failed: restore the others
                self.__exit__()


def in_force() -> tuple[Any, ...]:
    """Return the settings that prepared code has baked in: recorded, frozen or converted code.

    They are the default dtype, deterministic algorithms and, with a GPU, whether float32 matrix
    products and convolutions use TF32. Reading them takes 0.1 us, with a GPU 0.3 us, so that each
    tuned call can compare them.
    """
    settings = torch.get_default_dtype(), _get_deterministic_algorithms()
    if not _has_gpu():
        return settings
    return (
        *settings,
        _get_fp32_precision_getter("cuda", "matmul") == "tf32",
        _get_fp32_precision_getter("cuda", "conv") == "tf32",
    )


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def has_function_mode() -> bool:
    """Whether a function mode is active, which may change what operators do.

    A default device, which is a function mode too, does not count.
    """
    modes = map(_get_function_stack_at, range(_len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)
