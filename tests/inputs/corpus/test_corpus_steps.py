"""Weights and lengths of pieces that change at steps of training: from the step's first row on, and the same after a restart."""

import numpy as np
import pytest
from facts import raises_naming
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import assert_same, drain, take
from memory_documents import documents, make, mixture, segments, texts

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import Chat

# Letters of the texts of two sources.
A, B = b"A", b"B"


def sources(first, second, **fields):
    one, two = texts(60, seed=1, letter=A), texts(60, seed=2, letter=B)
    return mixture(one=(documents(one), first), two=(documents(two), second), change_by="steps", **fields)


def letters(batches):
    """The sources of each row's segments, as a set of letters."""
    rows = []
    for batch in batches:
        for labels, numbers in zip(batch.labels, batch.segment_ids, strict=True):
            # The first piece of a document begins with its letter.
            begins = [labels[numbers == number][0] for number in range(1, numbers.max() + 1)]
            rows.append({chr(label) for label in begins} & {"A", "B"})
    return rows


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_begins_and_another_ends_at_a_step(packing, shuffle):
    """Rows of step 9 and later are of the second source, but for documents that cross the border."""
    source = make(sources({0: 1, 9: 0}, {0: 0, 9: 1}), packing=packing, shuffle=shuffle, window_rows=7)
    rows = letters(take(source, 20))
    assert all(found <= {"A"} for found in rows[:18])
    border = 18 + 3  # a document has at most 42 tokens: 3 rows of 16
    assert all(found <= {"B"} for found in rows[border:])
    assert {"B"} in rows[border:]


@settings(max_examples=25, deadline=None)
@given(
    step=st.integers(1, 30),
    rows=st.integers(1, 5),
    window=st.integers(1, 12),
    weights=st.tuples(*[st.integers(1, 9)] * 4),
    by=st.sampled_from(["tokens", "documents"]),
)
def test_from_a_step_on_each_source_has_its_new_share(step, rows, window, weights, by):
    before, after = weights[:2], weights[2:]
    given_ = sources({0: before[0], step: after[0]}, {0: before[1], step: after[1]}, weigh_by=by)
    source = make(given_, batch_size=rows, window_rows=window, packing="pad", seq_len=64)
    took = lambda: dict(source.tokens_of if by == "tokens" else source.documents_of)  # noqa: E731
    take(source, step)
    begin = took()
    take(source, 40)
    end = took()
    # A row is a document. `tokens_of` counts whole windows, so up to a window's documents are counted on the wrong side.
    slack = (2 * window + 2) * (44 if by == "tokens" else 1)
    for found, weights_ in ((begin, before), ({name: end[name] - begin[name] for name in end}, after)):
        total = sum(found.values())
        assert abs(found["one"] - total * weights_[0] / sum(weights_)) <= slack


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_a_restart_on_either_side_of_a_change_gives_the_same_batches(packing):
    def build(host=0, hosts=1):
        fields = {"segment_len": {0: 4, 5: 9, 11: 16}} if packing == "best_fit" else {}
        given_ = sources({0: 3, 5: 1, 8: 2}, {0: 1, 5: 3}, temperature=1.5)
        return make(
            given_, batch_size=4 // hosts, num_infeed_hosts=hosts, infeed_host_index=host, packing=packing, **fields
        )

    whole, states = build(), []
    expected = []
    for _ in range(16):
        states.append(whole.get_state())
        expected += take(whole, 1)
    for number, state in enumerate(states):
        again = build()
        again.set_state(state)
        assert_same(take(again, 16 - number), expected[number:])
    for hosts in (2, 4):
        shares = [build(host, hosts) for host in range(hosts)]
        for host, share in enumerate(shares):
            share.set_state(states[3])
            rows = slice(host * 4 // hosts, (host + 1) * 4 // hosts)
            for batch, other in zip(take(share, 13), expected[3:], strict=True):
                np.testing.assert_array_equal(batch.labels, other.labels[rows])


@pytest.mark.parametrize("change_by", ["totals", "steps"])
def test_a_source_without_weight_is_read_when_the_others_have_ended(change_by):
    given_ = mixture(
        one=(documents(texts(60, seed=1, letter=A)), {0: 1, 2: 0}),
        two=(documents(texts(40, seed=2, letter=B)), {0: 1}),
        change_by=change_by,
        weigh_by="documents",
    )
    source = make(given_, is_training=False)
    drain(source)
    assert source.documents_of == {"one": 60, "two": 40}


def test_pieces_grow_at_their_step_and_no_token_is_lost():
    some = documents(texts(80, longest=60))
    plain = make(some, is_training=False)
    source = make(some, is_training=False, segment_len={0: 4, 6: 16, 9: 8}, window_rows=5)
    batches = drain(source)

    def longest(some):
        return max(len(one) for one in segments(some))

    assert [longest(batches[:6]), longest(batches[6:9]), longest(batches[12:])] == [4, 16, 8]
    assert sorted(b"".join(segments(batches))) == sorted(b"".join(segments(drain(plain))))
    # A constant is the same as one that holds from the first step on.
    fixed = [drain(make(some, is_training=False, segment_len=value)) for value in (4, {0: 4})]
    assert_same(*fixed)


def test_a_position_is_for_the_same_rows_of_a_batch():
    source = make(sources({0: 1, 9: 2}, {0: 1}), batch_size=2)
    take(source, 3)
    other = make(sources({0: 1, 9: 2}, {0: 1}), batch_size=4)
    with raises_naming(UserError, "batch_rows was 2 and is 4"):
        other.set_state(source.get_state())
    with raises_naming(UserError, "segment_len"):
        make(sources({0: 1, 9: 2}, {0: 1}), segment_len=8).set_state(source.get_state())


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"segment_len": 17}, ["segment_len=17", "seq_len=16"]),
        ({"segment_len": {5: 8}}, ["{5: 8}", "{0: tokens"]),
        ({"segment_len": {0: 0}}, ["{0: 0}", "1 to"]),
        ({"segment_len": 8, "packing": "pad"}, ["segment_len=8", "'best_fit'", "'pad'"]),
        ({"source": sources({0: 1, 9: 2}, {0: 1}), "packing": "split"}, ["change_by='steps'", "'split'", "'best_fit'"]),
    ],
)
def test_settings_that_can_not_be_are_refused(fields, facts):
    with raises_naming(UserError, *facts):
        make(**{"source": documents(texts(5)), **fields})


def test_conversations_are_not_cut(tmp_path):
    from chat_goldens import DATA, tokenizer_of

    chat = Chat(chat_template=str(DATA / "templates" / "chatml_marked.jinja"))
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    from spmd_trainer.inputs import Documents

    with raises_naming(UserError, "segment_len", "conversations"):
        make(Documents(str(path), processor=chat), tokenizer=tokenizer_of("chatml"), seq_len=64, segment_len=32)
