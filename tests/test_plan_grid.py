"""The comparison of the plan's search with brute force, on plans that are not compiled."""

import pytest
from facts import assert_names

from benchmarks import plan_grid
from spmd_trainer.errors import UserError
from spmd_trainer.planner import plan, plan_search, roofline
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_report import Outcome

NUMBER = 48


def outcome(number, seconds):
    candidate = Candidate((("data", number + 1),))
    return Outcome(candidate, seconds, seconds / 2, 3 * seconds / 2, bytes=100, rows=8, compiled_in=1.0)


def comparison(found, number=NUMBER):
    """A search that compiled the candidates `found` (number: seconds), of `number` that take 1, 2, ... seconds."""
    whole = [outcome(n, float(n + 1)) for n in range(number)]
    mine = [outcome(n, found[n]) if n in found else Outcome(o.candidate, reason="slow") for n, o in enumerate(whole)]
    return plan_grid.Comparison(mine, whole)


BEST = {n: float(n + 1) for n in range(5)}


@pytest.mark.parametrize(
    ("found", "number", "met"),
    [
        (BEST, NUMBER, True),
        ({**BEST, 0: 1.00004}, NUMBER, True),  # equal to four digits
        ({**BEST, 0: 1.002}, NUMBER, False),
        ({n: float(n + 1) for n in range(1, 6)}, NUMBER, False),  # without the fastest
        ({n: float(n + 1) for n in range(16)}, NUMBER, True),
        ({n: float(n + 1) for n in range(17)}, NUMBER, False),  # more than a third
        (BEST, 39, False),
    ],
)
def test_the_bar(found, number, met):
    assert comparison(found, number).is_met == met


def test_the_report_names_both_and_the_verdict():
    text = str(comparison(BEST))
    assert "SAME" in text
    assert_names(text, "5 of 48", "10%")
    assert text.count("data:5: 5 s (2.5 to 7.5)") == 2
    assert "DIFFERENT" in str(comparison({**BEST, 0: 1.5}))


def test_brute_force_compiles_what_the_search_left_out():
    class Fake:
        def compile(self, found):
            found.seconds, found.shortest, found.longest, found.compiled_in = 2.0, 1.0, 3.0, 0.5

    known, left_out = outcome(0, 1.0), Outcome(Candidate((("data", 2),)), reason="slow")
    whole = plan_grid.compile_all(Fake(), [known, left_out])
    assert [o.seconds for o in whole] == [1.0, 2.0]
    assert whole[0] is known
    assert not whole[1].reason
    assert left_out.reason == "slow"  # the search's outcome stays


CANDIDATES = [Candidate((("data", 8),)), Candidate((("data", 8),), minibatches=2)]


@pytest.fixture
def searches(tmp_path, monkeypatch):
    """Makes searches without candidates that share a file, and counts what they compile."""
    compiled, programs = [], ["program"]
    found = roofline.CollectiveTime("all-gather", ("data", "mdl"), 0.5, "ICI")
    sizes = dict.fromkeys(roofline.Estimate.__dataclass_fields__, 1.0)
    estimate = roofline.Estimate(**{**sizes, "collectives": [found]})
    fields = dict.fromkeys(plan.Plan.__dataclass_fields__)
    result = plan.Plan(**{**fields, "arguments": 1, "temporaries": 2, "outputs": 3, "estimate": estimate})

    def start(self, job, searched):
        self.outcomes = [Outcome(candidate, program=programs[-1]) for candidate in CANDIDATES]

    def make(self, candidate):
        compiled.append(candidate)
        if candidate.minibatches:
            raise UserError("too large")
        return result

    monkeypatch.setattr(plan_search.Search, "__init__", start)
    monkeypatch.setattr(plan_search.Search, "plan_of", make)
    return lambda key: plan_grid.KeptSearch(None, (), tmp_path / "kept.json", key), compiled, programs, result


def test_plans_are_kept(searches):
    make, compiled, programs, result = searches
    for _ in range(2):
        search = make("one")
        assert search.plan_of(CANDIDATES[0]) == result
        with pytest.raises(UserError, match="too large"):
            search.plan_of(CANDIDATES[1])
    assert len(compiled) == 2
    make("another").plan_of(CANDIDATES[0])
    assert len(compiled) == 3
    programs.append("another program")
    make("another").plan_of(CANDIDATES[0])
    assert len(compiled) == 4


def test_the_grids_are_limited():
    mesh = (("data", 64),)
    assert plan_grid.in_grid(Candidate(mesh))
    assert plan_grid.in_grid(Candidate(mesh, "save_nothing", 2))
    assert not plan_grid.in_grid(Candidate(mesh, "save_out_proj"))
    assert not plan_grid.in_grid(Candidate(mesh, minibatches=8))
