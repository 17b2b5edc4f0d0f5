"""Mixtures: shares of tokens and documents, and what happens when a source ends."""

import itertools

import pytest
from facts import raises_naming
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from input_helpers import drain, take
from memory_documents import documents, make, mixture, segments, texts

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.mixture import Mixture, Schedule, as_mixture, open_mixture

A, B = texts(100, letter=b"a"), texts(40, letter=b"b", longest=200)


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    count=st.integers(1, 200),
)
def test_at_every_moment_each_source_has_its_share_to_within_one_document(weights, sizes, count):
    shares = [weight / sum(weights) for weight in weights]
    schedule, taken = Schedule(shares, [0] * len(shares)), [0] * len(shares)
    for number in range(count):
        index = schedule.source
        taken[index] += sizes[number % len(sizes)]
        schedule.advance(taken[index])
        ahead = [one / share for one, share in zip(taken, shares, strict=True)]
        for one, share in zip(ahead, shares, strict=True):
            # A source that is ahead of the furthest behind is so by its last document at most.
            assert (one - min(ahead)) * share <= max(sizes) + 1e-6


@settings(deadline=None, max_examples=60)
@given(
    phases=st.lists(
        st.tuples(st.integers(0, 300), st.lists(st.sampled_from([0, 0.1, 1, 7]), min_size=3, max_size=3).filter(any)),
        max_size=4,
    ),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    stop=st.integers(0, 120),
)
def test_after_every_change_each_source_has_its_new_share_to_within_one_document(phases, sizes, stop):
    begins = {0: [1, 2, 3], **dict(phases)}
    weights = [{begin: begins[begin][source] for begin in sorted(begins)} for source in range(3)]
    assume(all(any(of_source.values()) for of_source in weights))  # a source that never has a weight is refused
    given = {f"s{source}": (documents(A), weights[source]) for source in range(3)}
    shares = [one.share for one in open_mixture(Mixture(given), is_training=True, shuffle=True)]
    schedule, taken = Schedule(shares, [0] * 3), [0] * 3
    for number in range(120):
        if number == stop:  # nothing but what was taken decides how it goes on
            schedule = Schedule(shares, taken)
        index = schedule.source
        taken[index] += sizes[number % len(sizes)]
        schedule.advance(taken[index])
        total = sum(taken)
        for source in range(3):
            wanted = 0.0
            for begin, end in itertools.pairwise([*sorted(begins), max(total, *begins)]):
                part = begins[max(one for one in begins if one <= begin)]
                wanted += max(0, min(end, total) - begin) * part[source] / sum(part)
            # Each of the others is ahead by a document at most, which this source lacks.
            assert abs(taken[source] - wanted) <= 2 * max(sizes) + 1e-6


def test_a_source_of_weight_0_gives_nothing_meanwhile():
    given = {"a": (documents(A), {0: 1, 10: 0, 20: 1}), "b": (documents(B), 1)}
    shares = [one.share for one in open_mixture(Mixture(given), is_training=True, shuffle=True)]
    schedule, taken, found = Schedule(shares, [0, 0]), [0, 0], ""
    for _ in range(30):
        index = schedule.source
        taken[index] += 1
        schedule.advance(taken[index])
        found += "ab"[index]
    assert found == "ab" * 5 + "b" * 10 + "ab" * 5


def test_weights_change_at_their_totals():
    changing = mixture(a=(documents(A), {0: 1, 50: 0, 80: 1}), b=(documents(B), {0: 1, 80: 3}), weigh_by="documents")
    source, found = make(changing, window_rows=1, batch_size=1), []
    while not found or sum(found[-1]) < 300:
        source.get_next()
        found.append(tuple(source.documents_of.values()))
    for a, b in found:
        total = a + b
        wanted = min(total, 50) / 2 + max(0, total - 80) / 4
        assert abs(a - wanted) <= 1


def test_a_position_is_valid_for_the_same_changes_alone():
    def weighed(**weights):
        return make(mixture(a=(documents(A), weights["a"]), b=(documents(B), 1)))

    state = weighed(a={0: 1, 500: 2}).get_state()
    weighed(a={500: 2, 0: 1}).set_state(state)
    for other in (1, {0: 1, 501: 2}, {0: 1, 500: 3}):
        with raises_naming(UserError, "other batches", "share"):
            weighed(a=other).set_state(state)


@pytest.mark.parametrize("weigh_by", ["tokens", "documents"])
def test_an_input_gives_each_source_its_share(weigh_by):
    source = make(mixture(a=(documents(A), 3), b=(documents(B), 1), weigh_by=weigh_by))
    for _ in range(60):
        source.get_next()
        found = source.tokens_of if weigh_by == "tokens" else source.documents_of
        longest = 205 if weigh_by == "tokens" else 1
        assert abs(found["a"] - 3 * found["b"]) <= 3 * longest
    assert found["a"] > 20


def test_the_seed_chooses_the_documents_and_not_the_shares():
    found = {}
    for seed in (1, 2):
        source = make(mixture(a=(documents(A), 3), b=(documents(B), 1), weigh_by="documents"), input_random_seed=seed)
        found[seed] = segments(take(source, 20))
        counts = source.documents_of
        assert counts["b"] > 2
        assert abs(counts["a"] - 3 * counts["b"]) <= 3
    assert found[1] != found[2]


def test_sources_without_weights_weigh_what_they_hold():
    unweighted = {"a": documents(A), "b": documents(B)}
    by_tokens = open_mixture(Mixture(unweighted), is_training=True, shuffle=True)
    sizes = [sum(map(len, some)) for some in (A, B)]
    assert [one.share for one in by_tokens] == pytest.approx([size / sum(sizes) for size in sizes])
    by_documents = open_mixture(Mixture(unweighted, weigh_by="documents"), is_training=True, shuffle=True)
    assert [one.share for one in by_documents] == pytest.approx([100 / 140, 40 / 140])


def test_temperature_makes_shares_more_equal():
    def shares(temperature):
        made = Mixture({"a": (documents(A), 9), "b": (documents(B), 1)}, temperature=temperature)
        return [one.share for one in open_mixture(made, is_training=True, shuffle=True)]

    assert shares(1.0) == pytest.approx([0.9, 0.1])
    assert shares(2.0) == pytest.approx([0.75, 0.25])
    assert shares(0.5) == pytest.approx([81 / 82, 1 / 82])


def test_repeat_goes_on_without_end():
    source = make(mixture(a=(documents(A), 1), b=(documents([b"b"]), 1), weigh_by="documents"))
    take(source, 100)
    assert source.endless
    assert min(source.documents_of.values()) > 100


@pytest.mark.parametrize("training", [True, False])
def test_drop_gives_every_source_its_epochs_and_goes_on_with_the_others(training):
    source = make(
        mixture(a=(documents(A), 1), b=(documents(B, epochs=2), 5), stopping_strategy="drop"), is_training=training
    )
    assert not source.endless
    found = b"".join(segments(drain(source)))
    assert len(found) == sum(len(text) + 1 for text in [*A, *B, *B])
    assert source.documents_of == {"a": 100, "b": 80}
    assert source.skipped == {"a": 0, "b": 0}


def test_stop_ends_when_the_turn_is_of_a_source_that_has_ended():
    source = make(mixture(a=(documents(A), 1), b=(documents(B), 1), weigh_by="documents", stopping_strategy="stop"))
    drain(source)
    assert source.documents_of == {"a": 41, "b": 40}  # then it is b's turn


def test_evaluation_gives_each_document_once_whatever_the_weights():
    source = make(mixture(a=(documents(A), 1), b=(documents(B), 50)), is_training=False)
    assert source.reset_for_eval
    assert sorted(b"".join(segments(drain(source)))) == sorted(b"".join(text + b"\n" for text in A + B))


BAD = {
    "weigh_by='token'": lambda: mixture(a=(documents(A), 1), weigh_by="token"),
    "did you mean 'tokens'|did you mean tokens": lambda: mixture(a=(documents(A), 1), weigh_by="token"),
    "stopping_strategy='stopp'": lambda: mixture(a=(documents(A), 1), stopping_strategy="stopp"),
    "temperature=0": lambda: mixture(a=(documents(A), 1), temperature=0),
    "has no sources": lambda: Mixture({}),
    "source 'a' of the mixture has weight -1": lambda: mixture(a=(documents(A), -1)),
    "source 'a' of the mixture has weight nan": lambda: mixture(a=(documents(A), float("nan"))),
    "source 'a' of the mixture has no weight at the beginning": lambda: mixture(a=(documents(A), {5: 1})),
    "source 'a' of the mixture has weights from": lambda: mixture(a=(documents(A), {0: 1, 0.5: 1})),
    "source 'a' of the mixture has weight -2": lambda: mixture(a=(documents(A), {0: 1, 7: -2})),
    "source 'a' of the mixture has no weight above 0": lambda: mixture(a=(documents(A), {0: 0, 7: 0})),
    "no source of the mixture has a weight above 0 from 7 on": lambda: mixture(
        a=(documents(A), {0: 1, 7: 0}), b=(documents(B), {0: 1, 5: 0, 9: 1})
    ),
    "source 'b' of the mixture is 'b.jsonl'": lambda: mixture(a=(documents(A), 1), b="b.jsonl"),
    "'b' of the mixture has no weight and others": lambda: mixture(a=(documents(A), 1), b=documents(B)),
    "source 'a' has epochs=0": lambda: mixture(a=(documents(A, epochs=0), 1)),
    "source 'a' of the mixture has epochs=2": lambda: mixture(a=(documents(A, epochs=2), 1)),
    "source 'b' of the mixture: shuffle='global' needs": lambda: mixture(
        a=(documents(A), 1), b=(documents(B, by_number=False, shuffle="global"), 1)
    ),
    "known before it is read": lambda: mixture(a=documents(A, sized=False), weigh_by="documents"),
    "has a share of 0": lambda: mixture(a=(documents(A), 1), b=(documents(B), 1e-300), temperature=0.01),
    r"give Documents\(": lambda: "corpus/*.jsonl",
}


@pytest.mark.parametrize("message", BAD)
def test_a_mixture_that_can_not_be_is_an_error_that_names_its_source(message):
    with pytest.raises(UserError, match=message):
        make(BAD[message]())


def test_documents_alone_are_a_mixture_of_one():
    assert as_mixture(documents(A), is_training=True).stopping_strategy == "repeat"
    assert as_mixture(documents(A, epochs=2), is_training=True).stopping_strategy == "drop"
    assert as_mixture(documents(A), is_training=False).stopping_strategy == "drop"
