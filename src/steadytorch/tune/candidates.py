"""Proposes candidates: known strong combinations, then neighbours of the leaders.

The order follows recorded searches (`benchmarks/results/rivals_h200_*`). Transforms that won
wherever they applied come first (fused separable convolutions, convolutions over patches as matrix
products). Transforms that never came close come last. The transform registry orders the transforms
of a candidate and excludes conflicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from steadytorch import transforms
from steadytorch.findings.finding import Finding
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.transforms.precision import ALLOWED, PRECISIONS, half_of, precision_of
from steadytorch.workload.workload import Workload

_VARIED_FIRST = ("attention_backend", "channels_last", "compile")
"""Transforms whose variations are tried first, in this order."""
_HALF = frozenset({"bf16", "fp16"})
_RECORDED = ("launch-bound", "compute-bound")
"""Regimes with recorded searches on GPUs."""


def suggested_by(candidate: Candidate, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Ids of the findings that at least one of the candidate's transforms addresses."""
    names = {spec.name for spec in candidate}
    return tuple(finding.id for finding in findings if names.intersection(finding.transforms))


def engine_prefix(
    available: Sequence[TransformSpec], precision: str, training: bool = False
) -> Candidate:
    """Transforms under which engines are chosen; dtype and layout decide which engines exist."""
    converts = "autocast" if training else "cast_weights"
    return transforms.order(
        [
            spec
            for spec in available
            if spec.name in ("fold_batch_norm", "channels_last")
            or (spec.name == converts and dict(spec.parameters)["dtype"] == half_of(precision))
        ]
    )


def unpadded(candidate: Candidate) -> Candidate:
    """The candidate with its matrix products compiled without padding."""
    return tuple(
        TransformSpec(spec.name, tuple({**dict(spec.parameters), "unpadded": True}.items()))
        if spec.name == "compile"
        else spec
        for spec in candidate
    )


class CandidateSource:
    """Proposes combinations of the transforms that apply to one workload.

    Args:
        available: all transform variants that apply, as data.
        workload: the workload to tune; some exclusions depend on it.
        precision: the precision class that the user allows.
        regime: launch-, memory- or compute-bound; orders the seeds.
        findings: findings about the untouched workload; candidates that could recover more time
            come first.
    """

    def __init__(
        self,
        available: Sequence[TransformSpec],
        workload: Workload,
        precision: str,
        regime: str,
        findings: Sequence[Finding] = (),
    ) -> None:
        self._available, self._workload = tuple(available), workload
        self._precision, self._classes = half_of(precision), ALLOWED[precision]
        self._regime = regime
        self._findings = tuple(findings)

    def seeds(self) -> list[Candidate]:
        """Known strong combinations, the most promising for the workload's regime first."""
        return [candidate for candidate in self._combinations() if not self._is_weak(candidate)]

    def late(self) -> list[Candidate]:
        """Weak combinations, tried after variations of the leaders."""
        return [candidate for candidate in self._combinations() if self._is_weak(candidate)]

    def lowered(self) -> Candidate:
        """Candidate with just the transform that lowers precision as far as allowed, or empty."""
        lower = self._lower()
        return () if lower is None else (lower,)

    def _combinations(self) -> list[Candidate]:
        found = self._of_training() if self._workload.is_training else self._of_inference()
        # With a loader, add prefetch to each candidate: else loading would hide the model's gain.
        ahead = self._spec("prefetch")
        return self._allowed([(*combination, ahead) for combination in [*found, ()]])

    def _is_weak(self, candidate: Candidate) -> bool:
        """Whether a candidate lacks a CUDA graph or a lower dtype that it could have.

        In recorded searches for inference, one weak candidate came within 6 % of the best, and no
        other weak candidate within 15 %. In recorded searches for training (`rivals-train_*`), one
        came within 6 %, and most took more than twice as long. No candidate is weak where no
        searches are recorded: for other regimes, loaders, and models without a CUDA graph.
        """
        training = self._workload.is_training
        graph = self._spec("step_graph", scope="step") if training else self._spec("cuda_graph")
        known = training or self._regime in _RECORDED
        if graph is None or not known or self._spec("prefetch") is not None:
            return False
        lower = self._lower()
        return graph not in candidate or (lower is not None and lower not in candidate)

    def _of_inference(self) -> list[tuple[TransformSpec | None, ...]]:
        layout = self._spec("channels_last")
        graph = self._spec("cuda_graph")
        frozen = self._spec("compile", mode="default", freezing=True, combo_kernels=False)
        combined = self._spec("compile", mode="default", freezing=True, combo_kernels=True)
        plain = self._spec("compile", mode="default", freezing=False, combo_kernels=False)
        trees = self._spec("compile", mode="reduce-overhead", freezing=True)
        autocast = self._spec("autocast", dtype=self._precision)
        eager = self._spec("inference_mode")
        lower = self._lower() or self._tf32()
        fold, engines = self._spec("fold_batch_norm"), self._spec("cudnn_engines")
        stem = self._spec("fused_kernels", stem=True, residual=False)
        # Only for uncompiled candidates, since compilers fuse poolings themselves.
        pooled = stem or self._spec("fused_kernels", stem=False, residual=False, separable=False)
        with_engines = [
            (fold, stem, lower, layout, engines, frozen, graph),
            (fold, pooled, lower, layout, engines, graph),
            (fold, lower, layout, engines, frozen, graph),
            (fold, lower, layout, engines, graph),
        ]
        # Under compilation and graph capture, models pass masks that they leave out in eager mode.
        # Masks off fused kernels cost more than the rest of an encoder.
        mask, patches = self._spec("dense_mask"), self._spec("linear_patches")
        separable = self._spec("fused_kernels", separable=True) if frozen is not None else None
        front: list[tuple[TransformSpec | None, ...]] = []
        if separable is not None:
            front.append((separable, lower, layout, patches, frozen, graph))
            with_engines.insert(0, (separable, lower, layout, patches, engines, frozen, graph))
        if patches is not None:
            front.append((lower, layout, patches, mask, frozen, graph))
            front += [(lower, layout, patches, mask, graph)] if graph is not None else []
        compiled = [
            (lower, layout, mask, frozen, graph),
            (lower, layout, mask, combined or frozen, graph),
            (lower, layout, mask, plain, graph or eager),
            (lower, mask, frozen, graph),
            (lower, layout, mask, frozen),
            (lower, layout, mask, trees),
        ]
        if stem is not None:
            compiled.insert(0, (fold, stem, lower, layout, frozen, graph))
        uncompiled = [(lower, layout, mask, graph), (lower, mask, graph), (lower, layout, eager)]
        alone = [(fold, lower, layout, engines, eager)] if engines is not None else []
        rest = [
            (autocast, layout, mask, graph),
            (mask, frozen, graph),
            (mask, graph),
            (eager,),
            (layout, eager),
        ]
        first, second = (
            (uncompiled[:1] + compiled[:1], uncompiled[1:] + compiled[1:])
            if self._regime == "launch-bound"
            else (compiled[:1] + uncompiled[:1], compiled[1:] + uncompiled[1:])
        )
        if self._regime == "launch-bound":
            with_engines.reverse()
        sums = self._spec("fused_kernels", residual=True, stem=stem is not None) or stem
        without = [(fold, sums, lower, layout, graph)] if sums is not None else []
        chosen = with_engines if engines is not None else without
        return [*self._on_engines(), *front, *chosen, *first, *second, *alone, *rest]

    def _on_engines(self) -> list[tuple[TransformSpec, ...]]:
        """The first variant of each engine beyond PyTorch, in the lowest precision class allowed.

        If the lowest class is int8, a variant in the next higher class follows, because int8 may be
        too inaccurate.
        """
        allowed = sorted(
            ((spec,) for spec in self._available if precision_of((spec,)) in self._classes),
            key=lambda alone: PRECISIONS.index(precision_of(alone)),
            reverse=True,
        )
        found: dict[tuple[str, bool], tuple[TransformSpec, ...]] = {}
        for alone in allowed:
            for name in transforms.engines(alone):
                found.setdefault((name, precision_of(alone) == "int8"), alone)
        return list(found.values())

    def _of_training(self) -> list[tuple[TransformSpec | None, ...]]:
        """Combinations for training; those that record the whole step as one graph come first."""
        graph, update = self._spec("step_graph", scope="step"), self._update()
        layout, engines = self._spec("channels_last"), self._spec("cudnn_engines")
        plain = self._spec("compile", mode="default", freezing=False, combo_kernels=False)
        combined = self._spec("compile", mode="default", freezing=False, combo_kernels=True)
        compiled = combined or plain
        lower, loss = self._lower() or self._tf32(), self._spec("compile_loss")
        models = [(layout, compiled, loss, lower), (layout, plain, loss, lower), (layout, lower)]
        models += [(compiled, loss, lower), (lower,)]
        if engines is not None:
            models += [(layout, engines, compiled, loss, lower), (layout, engines, lower)]
        recorded = [(*model, update, graph) for model in models] if graph is not None else []
        return [
            *recorded,
            *((*model, update) for model in models),
            (update,),
            *models,
            (engines,),
            (layout, compiled, loss),
            (compiled, loss),
            (layout,),
        ]

    def _update(self) -> TransformSpec | None:
        """The usually fastest optimizer step: fused, with equal parameter groups merged."""
        for implementation in ("fused", "foreach"):
            for merge in (True, False):
                found = self._spec("optimizer", implementation=implementation, merge=merge)
                if found is not None:
                    return found
        return None

    def _lower(self) -> TransformSpec | None:
        autocast = self._spec("autocast", dtype=self._precision)
        if self._workload.is_training:
            return autocast
        return self._spec("cast_weights", dtype=self._precision) or autocast

    def _tf32(self) -> TransformSpec | None:
        return self._spec("tf32") if self._precision != "same" else None

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Candidates one step away: one transform added, removed, or set differently."""
        found: list[list[TransformSpec]] = []
        varied = [*(spec for spec in self._available if spec not in candidate), *candidate]
        for spec in sorted(varied, key=_rank):
            others = [s for s in candidate if s.name != spec.name]
            found.append(others if spec in candidate else [*others, spec])
        return self._allowed(found)

    def beyond(self, candidate: Candidate) -> list[Candidate]:
        """Variants of the leader in precision classes that the user did not allow.

        If no 16-bit dtype is allowed, there is one 16-bit variant for PyTorch and one for each
        engine. One 16-bit dtype suffices because bf16 and fp16 are about equally fast, and a
        compilation takes up to a minute. Candidates in int8 are left out, because int8 needs
        quantisation and calibration.
        """
        found: list[Iterable[TransformSpec]] = []
        in_16_bits = None if _HALF & self._classes else set[tuple[str, ...]]()
        for spec in self._available:
            precision, engine = precision_of((spec,)), transforms.engines((spec,))
            if precision in (*self._classes, "int8"):
                continue
            if precision in _HALF:
                if in_16_bits is None or engine in in_16_bits:
                    continue
                in_16_bits.add(engine)
            others = [
                s
                for s in candidate
                if precision_of((s,)) == "same"
                and s.name != spec.name
                and not transforms.engines((s, spec))
            ]
            found.append([*others, spec])
        return list(self._ordered(found))

    def _allowed(self, combinations: Iterable[Iterable[TransformSpec | None]]) -> list[Candidate]:
        found = [c for c in self._ordered(combinations) if precision_of(c) in self._classes]
        return sorted(found, key=self._recoverable_ns, reverse=True)

    def _recoverable_ns(self, candidate: Candidate) -> int:
        ids = suggested_by(candidate, self._findings)
        return sum(f.recoverable_ns[1] for f in self._findings if f.id in ids)

    def _ordered(
        self, combinations: Iterable[Iterable[TransformSpec | None]]
    ) -> Iterator[Candidate]:
        seen: set[Candidate] = {()}
        for combination in combinations:
            candidate = transforms.order([spec for spec in combination if spec is not None])
            if candidate in seen or transforms.idle(candidate) is not None:
                continue
            if transforms.conflict(candidate, self._workload) is None:
                seen.add(candidate)
                yield candidate

    def _spec(self, name: str, **parameters: str | int | bool) -> TransformSpec | None:
        """The first available variant with these parameters; what it leaves out is off."""
        for spec in self._available:
            held = dict(spec.parameters)
            if spec.name == name and all(held.get(k, False) == v for k, v in parameters.items()):
                return spec
        return None


def _rank(spec: TransformSpec) -> int:
    return _VARIED_FIRST.index(spec.name) if spec.name in _VARIED_FIRST else len(_VARIED_FIRST)
