"""How continuations are sorted, and written behind their prompts."""

import jax.numpy as jnp

from spmd_trainer.decoder.generation import decode


def test_the_best_sample_comes_first():
    tokens = jnp.array([[[1, 1], [2, 2], [3, 3]], [[4, 4], [5, 5], [6, 6]]])
    lengths = jnp.array([[1, 2, 3], [4, 5, 6]])
    log_probs = jnp.array([[[-3.0, 0], [-1, -1], [-0.5, -0.5]], [[-1, -1], [-2, 0], [-1, -2]]])
    found = decode._best_first([tokens, lengths, log_probs])
    # Of equal ones, the earlier comes first.
    assert found[0].tolist() == [[[3, 3], [2, 2], [1, 1]], [[4, 4], [5, 5], [6, 6]]]
    assert found[1].tolist() == [[3, 2, 1], [4, 5, 6]]
    assert found[2].sum(-1).tolist() == [[-1, -2, -3], [-2, -2, -3]]


def test_a_continuation_follows_its_prompt_directly():
    prompts, lengths = jnp.array([[1, 2, 0], [3, 4, 5]]), jnp.array([2, 3])
    continuations = jnp.array([[[7, 8]], [[9, 6]]])
    is_prompt, rows = decode._behind_prompts(prompts, lengths, continuations, fill=-1)
    assert rows.tolist() == [[[1, 2, 7, 8, -1]], [[3, 4, 5, 9, 6]]]
    assert is_prompt.sum(-1).tolist() == [[2], [3]]
