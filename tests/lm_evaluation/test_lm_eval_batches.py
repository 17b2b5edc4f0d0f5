"""The arrays that requests of lm-eval become."""

from spmd_trainer.lm_eval import requests
from spmd_trainer.lm_eval.requests import Prompt, Scored
from spmd_trainer.lm_eval.steps import Shape


def test_only_the_answer_has_weight():
    batch = requests._score_arrays([Scored((5, 6, 7, 8), 2), Scored((9, 4), 1)], Shape(rows=3, width=4))
    assert batch.ids.tolist() == [[5, 6, 7, 0], [9, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, 8, 0], [4, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.weights.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.paddings.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.eval_sample_weights.tolist() == [1, 1, 0]


def test_random_numbers_depend_on_the_request_and_not_on_its_row():
    one, other = (("0000001f", Prompt((5, 6))), ("00000abc", Prompt((7,))))
    for rows in ([one, other], [other, one]):
        keys, prompts = zip(*rows, strict=True)
        batch = requests._prompt_arrays(keys, prompts, Shape(rows=2, width=2))
        index = {tuple(ids): int(number) for ids, number in zip(batch.ids.tolist(), batch.prompt_index, strict=True)}
        assert index == {(5, 6): 0x1, (7, 0): 0xAB}
        assert sorted(batch.prefix_lengths.tolist()) == [1, 2]
