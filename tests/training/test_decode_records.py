"""Records of decoded examples, made of arrays alone."""

import numpy as np

from spmd_trainer.training import decode_records

NOT_DECODED = 1.0  # what praxis leaves in `logprobs` where it decoded nothing


class Letters:
    """An input whose tokens are letters."""

    def ids_to_strings(self, ids, lengths):
        return ["".join(map(chr, row[:length])) for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]


def ids(*texts):
    return np.array([[ord(letter) for letter in text.ljust(5, "\0")] for text in texts], np.int32)


OUTPUTS = {
    "output_ids": ids("abcd", "abxy", "zz")[:, None],
    "decode_lengths": np.array([[5], [4], [5]]),
    "prefix_lengths": np.array([2, 2, 1]),
    "logprobs": np.array([[0, 0, -1, -2, NOT_DECODED], [0, 0, -1, -3, NOT_DECODED], [0, 0, 0, 0, 0]], float)[:, None],
}


def records(**inputs):
    inputs = {"ids": ids("ab", "ab", "z"), **inputs}
    return list(decode_records.records(Letters(), OUTPUTS, inputs, first=10))


def test_rows_without_weight_have_no_record():
    found = records(eval_sample_weights=np.array([1.0, 0.0, 1.0]))
    assert [record["index"] for record in found] == [10, 12]


def test_a_record_ends_where_decoding_ended():
    first, second, _ = records()
    # The first row's length is that of the whole array, as praxis says of a sample that met no end.
    assert (first["prompt"], first["output"], first["score"]) == ("ab", "cd", -3.0)
    assert (second["prompt"], second["output"], second["score"]) == ("ab", "xy", -4.0)


def test_prompts_keep_their_own_numbers():
    assert [record["index"] for record in records(prompt_index=np.array([7, 3, 5]))] == [7, 3, 5]
