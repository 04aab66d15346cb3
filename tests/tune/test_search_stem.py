"""The leader's fused stem gets its fastest configuration if time allows."""

import pytest
from scripted import EAGER, FOLD, MS, Act, Notes, Stage, died, make_search

from steadytorch.results.candidate import TransformSpec
from steadytorch.tune.search import STEM_S
from steadytorch.tune.select import SearchOptions

CONFIG = "64x32x7-w4s1"
PHASE = "tuning the fused stem"


def fused(config="", residual=False):
    asked = (("stem", True), ("residual", residual), ("config", config))
    return TransformSpec("fused_kernels", asked)


PLAIN = TransformSpec("fused_kernels", (("stem", False), ("residual", False), ("config", "")))
ACTS = {
    (EAGER,): Act(9 * MS),
    (FOLD, fused()): Act(6 * MS),
    (FOLD, fused(CONFIG)): Act(5 * MS),
}


class Chooser:
    """Returns a configuration and records its arguments."""

    def __init__(self, answer=CONFIG):
        self.answer, self.asked = answer, []

    def __call__(self, prefix, seconds):
        self.asked.append((prefix, seconds))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def _search(available, chooser, acts=ACTS, **options):
    notes = Notes()
    options = SearchOptions(**{"budget_s": 300.0, **options})
    search = make_search(Stage(acts), available, options, notes, choose_stem=chooser)
    return search.run(), notes


def test_the_leader_is_tried_with_the_one_that_was_chosen():
    chooser = Chooser()
    result, notes = _search([EAGER, FOLD, PLAIN, fused()], chooser)
    assert chooser.asked == [((FOLD, fused()), STEM_S)]
    assert result.chosen == (FOLD, fused(CONFIG))
    assert PHASE in notes.phases


def test_what_else_the_leader_fuses_stays():
    both = {**ACTS, (FOLD, fused(residual=True)): Act(4 * MS)}
    both[(FOLD, fused(CONFIG, residual=True))] = Act(3 * MS)
    available = [EAGER, FOLD, fused(), fused(residual=True)]
    result, _ = _search(available, Chooser(), both)
    assert result.chosen == (FOLD, fused(CONFIG, residual=True))


@pytest.mark.parametrize("answer", ["", died()], ids=["the usual one", "nobody answers"])
def test_otherwise_the_stem_stays_as_it_follows_from_the_sizes(answer):
    result, notes = _search([EAGER, FOLD, fused()], Chooser(answer))
    assert result.chosen == (FOLD, fused())
    said = [
        phase
        for phase in notes.phases
        if phase.startswith("keeping the default stem configuration")
    ]
    assert bool(said) == bool(answer)


def test_nobody_is_asked_without_time_to_try_the_answer():
    chooser = Chooser()
    result, _ = _search([EAGER, FOLD, fused()], chooser, budget_s=STEM_S + 8)
    assert not chooser.asked
    assert result.chosen == (FOLD, fused())


@pytest.mark.parametrize("available", [[EAGER, PLAIN], [EAGER], [EAGER, FOLD, fused()]])
def test_nobody_is_asked_where_the_leader_has_no_fused_stem(available):
    chooser = Chooser()
    result, _ = _search(available, chooser, {(EAGER,): Act(9 * MS)})
    assert not chooser.asked
    assert result.chosen == (EAGER,)
