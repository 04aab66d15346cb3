"""The contract of a transform, as a check that authors of plug-ins can run.

The check applies a transform to two small models and calls each several times. A search also
verifies candidates on the user's workload, but the contract check finds mistakes earlier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steadytorch.ambient import ambient
from steadytorch.device.facts import load_facts
from steadytorch.errors import SteadyError, one_line
from steadytorch.transforms import plugins
from steadytorch.transforms.base import Applicable, NotApplicable, Transform
from steadytorch.workload.signature import tensors_of
from steadytorch.workload.workload import Workload

TOLERANCES = {"same": 5e-5, "tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2, "int8": 1e-1}
"""Largest error of a result per precision class, relative to its largest element."""


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor, *, bias: Tensor) -> dict[str, Tensor]:
        hidden = self.head(self.embedding(ids)) + bias
        return {"hidden": hidden, "best": hidden.argmax(-1)}


def workloads(device: str) -> dict[str, Workload]:
    """Two small workloads: images, and tokens with a keyword argument and several outputs."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        ids, bias = torch.randint(0, 64, (2, 8)), torch.randn(32)
        return {
            "images": Workload(_Images().eval(), torch.randn(2, 3, 8, 8)).to(device),
            "tokens": Workload(_Tokens().eval(), ids, {"bias": bias}).to(device),
        }
    finally:
        torch.random.set_rng_state(state)


class Checked(NamedTuple):
    """Result of the check.

    Attributes:
        violations: broken rules, one sentence each.
        not_run: why no variant was applied here; empty if one was.
    """

    violations: list[str]
    not_run: str


def violations(kind: type[Transform], device: str = "cpu") -> list[str]:
    """The rules that a transform breaks; empty if it keeps the contract.

    A plug-in's test can call `assert not violations(MyTransform)`.

    Args:
        kind: the transform.
        device: a torch device string.
    """
    return check(kind, device).violations


def check(kind: type[Transform], device: str = "cpu") -> Checked:
    """Checks the class, then tries each variant on the small workloads that it applies to.

    Args:
        kind: the transform.
        device: a torch device string.
    """
    if (fault := plugins.class_fault(getattr(kind, "name", ""), kind)) is not None:
        return Checked([fault], "")
    found: list[str] = []
    reasons: list[str] = []
    facts, has_run = load_facts(device), False
    for parameters in kind.variants(facts):
        transform = kind(parameters)
        for name, workload in workloads(device).items():
            label = f"{transform.spec} on {name}"
            try:
                answer = transform.applies_to(workload, facts)
                if isinstance(answer, Applicable):
                    has_run = True
                    found += [f"{label}: {each}" for each in _broken(transform, workload)]
                elif isinstance(answer, NotApplicable) and answer.reason:
                    reasons.append(answer.reason)
                else:
                    found.append(f"{label}: applies_to returned {answer!r:.60}")
            except SteadyError as error:  # it applies, but this model or machine cannot do it
                reasons.append(str(error))
            except Exception as error:
                found.append(f"{label}: raised {one_line(error)}")
    not_run = "" if has_run or found else reasons[0] if reasons else "no variant for this device"
    return Checked(found, not_run)


@torch.no_grad()
def _broken(transform: Transform, workload: Workload) -> list[str]:
    before, state = ambient(), _copies(workload.model.state_dict().values())
    given = _tensors(workload)
    kept = _copies(given)
    expected = _results(workload.model, workload)
    other = [t.flip(-1) for t in given]
    following = iter(other)
    changed = Workload(
        workload.model,
        tuple(next(following) for _ in workload.inputs),
        {name: next(following) for name in workload.kwargs},
    )
    expected_other = _results(changed.model, changed)
    found: list[str] = []
    with transform.applied(workload) as applied:
        first = _results(applied.model, workload)
        at_once = _copies(first)
        if ambient() != before:
            found.append("leaves a process-wide setting changed between calls")
        second = _results(applied.model, changed)
        if not _equal(first, at_once):
            found.append("a later call overwrites the first result")
    found += [f"first call: {fault}" for fault in _faults(at_once, expected, transform.precision)]
    faults = _faults(second, expected_other, transform.precision)
    found += [f"call with other values: {fault}" for fault in faults]
    if not _equal(given, kept):
        found.append("writes to its inputs")
    if not _equal(list(workload.model.state_dict().values()), state):
        found.append("changes the weights or buffers of the untouched model")
    if ambient() != before:
        found.append("leaves a process-wide setting changed after it is undone")
    return found


def _tensors(workload: Workload) -> list[Tensor]:
    return tensors_of((workload.inputs, dict(workload.kwargs)))


def _results(model: Any, workload: Workload) -> list[Tensor]:
    return tensors_of(model(*workload.inputs, **workload.kwargs))


def _copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _faults(found: list[Tensor], expected: list[Tensor], precision: str) -> list[str]:
    if len(found) != len(expected):
        return [f"returns {len(found)} tensors, expected {len(expected)}"]
    faults = []
    for i, (out, ref) in enumerate(zip(found, expected, strict=True)):
        if (out.shape, out.dtype, out.device) != (ref.shape, ref.dtype, ref.device):
            there = f"{tuple(out.shape)} {out.dtype} on {out.device}"
            faults.append(f"result {i} is {there}, expected {tuple(ref.shape)} {ref.dtype}")
        elif out.is_floating_point():
            if torch.equal(out, ref):  # and no division by zero
                continue
            error = float((out.double() - ref.double()).abs().max() / ref.double().abs().max())
            if not error <= TOLERANCES[precision]:
                limit = f"{TOLERANCES[precision]:.0e} of class {precision}"
                faults.append(f"result {i} has relative error {error:.1e}, above {limit}")
        elif precision == "same" and not torch.equal(out, ref):
            faults.append(f"result {i} differs")
    return faults
