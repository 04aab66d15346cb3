"""Which candidates are worth a trial: known-strong combinations, then neighbours of the leaders.

What never came near the best in recorded searches (`benchmarks/results/rivals_h200_*`) comes last,
what was it wherever it applied (fused separable convolutions, patches as products) first.
Pure functions over names. Order and exclusion of transforms come from the registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from steadytorch import transforms
from steadytorch.findings.finding import Finding
from steadytorch.results.candidate import Candidate, TransformSpec
from steadytorch.transforms.precision import ALLOWED, precision_of
from steadytorch.workload.workload import Workload

_VARIED_FIRST = ("attention_backend", "channels_last", "compile")
"""Neighbours that differ in these come before others, in this order."""
_RECORDED = ("launch-bound", "compute-bound")
"""Regimes of the searches on GPUs that were recorded."""


def describe(candidate: Candidate) -> str:
    """The candidate in one line, as tables show it."""
    return " + ".join(map(str, candidate)) or "untouched"


def suggested_by(candidate: Candidate, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Ids of the findings that one of the candidate's transforms is to mend."""
    names = {spec.name for spec in candidate}
    return tuple(finding.id for finding in findings if names.intersection(finding.transforms))


def engine_prefix(
    available: Sequence[TransformSpec], precision: str, training: bool = False
) -> Candidate:
    """What engines of cuDNN are chosen under: element type and layout decide which there are."""
    converts = "autocast" if training else "cast_weights"
    return transforms.order(
        [
            spec
            for spec in available
            if spec.name in ("fold_batch_norm", "channels_last")
            or (spec.name == converts and dict(spec.parameters)["dtype"] == precision)
        ]
    )


def stem_of(candidate: Candidate) -> TransformSpec | None:
    """What fuses the stem in a candidate; None where it is not fused."""
    return next((spec for spec in candidate if dict(spec.parameters).get("stem")), None)


def recut(candidate: Candidate, config: str) -> Candidate:
    """The candidate with its fused stem cut up as in this configuration."""
    stem = stem_of(candidate)
    if stem is None:
        return candidate
    parameters = {**dict(stem.parameters), "config": config}
    new = TransformSpec(stem.name, tuple(parameters.items()))
    return tuple(new if spec == stem else spec for spec in candidate)


class Moves:
    """The options that apply to one workload, and how to combine them.

    Args:
        available: every transform variant that applies, as data.
        workload: what is tuned; some exclusions depend on it.
        precision: the class the user allows.
        regime: launch-, memory- or compute-bound; orders the seeds.
        findings: what was seen of the untouched workload: candidates that would recover more of its
            time come first.
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
        self._precision = precision
        self._regime = regime
        self._findings = tuple(findings)

    def seeds(self) -> list[Candidate]:
        """Combinations known to be strong, the most promising for the regime first."""
        return [candidate for candidate in self._combinations() if not self._is_weak(candidate)]

    def late(self) -> list[Candidate]:
        """Combinations for the time that variations of the leaders leave."""
        return [candidate for candidate in self._combinations() if self._is_weak(candidate)]

    def _combinations(self) -> list[Candidate]:
        found = self._of_training() if self._workload.is_training else self._of_inference()
        # Where a loader feeds the steps, most of what the model gains would hide behind it.
        ahead = self._spec("prefetch")
        return self._allowed([(*combination, ahead) for combination in [*found, ()]])

    def _is_weak(self, candidate: Candidate) -> bool:
        """Whether it goes without the graph, or without a lower element type, that it could have.

        In the recorded searches none of these was within 15 % of the best, but for one at 6 %. Of
        other regimes, of loaders and of what no graph can replay there are none.
        """
        graph = self._spec("cuda_graph")
        fed = self._workload.is_training or self._spec("prefetch") is not None
        if graph is None or fed or self._regime not in _RECORDED:
            return False
        cast = self._spec("cast_weights", dtype=self._precision)
        return graph not in candidate or (cast is not None and cast not in candidate)

    def _of_inference(self) -> list[tuple[TransformSpec | None, ...]]:
        cast = self._spec("cast_weights", dtype=self._precision)
        layout = self._spec("channels_last")
        graph = self._spec("cuda_graph")
        frozen = self._spec("compile", mode="default", freezing=True)
        plain = self._spec("compile", mode="default", freezing=False)
        trees = self._spec("compile", mode="reduce-overhead", freezing=True)
        autocast = self._spec("autocast", dtype=self._precision)
        eager = self._spec("inference_mode")
        lower = cast or self._tf32()
        fold, engines = self._spec("fold_batch_norm"), self._spec("cudnn_engines")
        stem = self._spec("fused_kernels", stem=True, residual=False)
        # A compiler fuses poolings by itself.
        pooled = stem or self._spec("fused_kernels", stem=False, residual=False, separable=False)
        with_engines = [
            (fold, stem, lower, layout, engines, frozen, graph),
            (fold, pooled, lower, layout, engines, graph),
            (fold, lower, layout, engines, frozen, graph),
            (fold, lower, layout, engines, graph),
        ]
        # Where masks keep attention from fused kernels, it does so in compiled and recorded code.
        mask, patches = self._spec("dense_mask"), self._spec("linear_patches")
        separable = self._spec("fused_kernels", separable=True) if frozen is not None else None
        front: list[tuple[TransformSpec | None, ...]] = []
        if separable is not None:
            front.append((separable, lower, layout, patches, frozen, graph))
            with_engines.insert(0, (separable, lower, layout, patches, engines, frozen, graph))
        if patches is not None:
            front.append((lower, layout, patches, mask, frozen, graph))
            front += [(lower, layout, patches, graph)] if graph is not None else []
        compiled = [
            (lower, layout, frozen, graph),
            (lower, layout, plain, graph or eager),
            (lower, frozen, graph),
            (lower, layout, frozen),
            (lower, layout, trees),
        ]
        if mask is not None:
            compiled.insert(0, (lower, layout, mask, frozen, graph))
        if stem is not None:
            compiled.insert(0, (fold, stem, lower, layout, frozen, graph))
        uncompiled = [(lower, layout, graph), (lower, graph), (lower, layout, eager)]
        alone = [(fold, lower, layout, engines, eager)] if engines is not None else []
        rest = [(autocast, layout, graph), (frozen, graph), (graph,), (eager,), (layout, eager)]
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
        return [*front, *chosen, *first, *second, *alone, *rest]

    def _of_training(self) -> list[tuple[TransformSpec | None, ...]]:
        """Whole steps as one graph first, over compiled code and without a compiler."""
        graph, update = self._spec("step_graph", scope="step"), self._update()
        layout, engines = self._spec("channels_last"), self._spec("cudnn_engines")
        compiled = self._spec("compile", mode="default", freezing=False)
        lower = self._spec("autocast", dtype=self._precision) or self._tf32()
        models = [(layout, compiled, lower), (layout, lower), (compiled, lower), (lower,)]
        if engines is not None:
            models += [(layout, engines, compiled, lower), (layout, engines, lower)]
        recorded = [(*model, update, graph) for model in models] if graph is not None else []
        return [
            *recorded,
            *((*model, update) for model in models),
            (update,),
            *models,
            (engines,),
            (layout, compiled),
            (compiled,),
            (layout,),
        ]

    def _update(self) -> TransformSpec | None:
        """The optimizer's fastest step as a rule: fused, its groups merged where some are equal."""
        for implementation in ("fused", "foreach"):
            for merge in (True, False):
                found = self._spec("optimizer", implementation=implementation, merge=merge)
                if found is not None:
                    return found
        return None

    def _tf32(self) -> TransformSpec | None:
        return self._spec("tf32") if self._precision != "same" else None

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Candidates one step away: a transform more, one fewer, or one with another setting."""
        found: list[list[TransformSpec]] = []
        varied = [*(spec for spec in self._available if spec not in candidate), *candidate]
        for spec in sorted(varied, key=_rank):
            others = [s for s in candidate if s.name != spec.name]
            found.append(others if spec in candidate else [*others, spec])
        return self._allowed(found)

    def beyond(self, candidate: Candidate) -> list[Candidate]:
        """What the leader would become in precision classes that the user did not allow."""
        found: list[Iterable[TransformSpec]] = []
        for spec in self._available:
            if precision_of((spec,)) in ALLOWED[self._precision]:
                continue
            others = [s for s in candidate if precision_of((s,)) == "same" and s.name != spec.name]
            found.append([*others, spec])
        return list(self._ordered(found))

    def _allowed(self, combinations: Iterable[Iterable[TransformSpec | None]]) -> list[Candidate]:
        allowed = ALLOWED[self._precision]
        found = [c for c in self._ordered(combinations) if precision_of(c) in allowed]
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
            if candidate not in seen and transforms.conflict(candidate, self._workload) is None:
                seen.add(candidate)
                yield candidate

    def _spec(self, name: str, **parameters: str | int | bool) -> TransformSpec | None:
        for spec in self._available:
            if spec.name == name and parameters.items() <= dict(spec.parameters).items():
                return spec
        return None


def _rank(spec: TransformSpec) -> int:
    return _VARIED_FIRST.index(spec.name) if spec.name in _VARIED_FIRST else len(_VARIED_FIRST)
