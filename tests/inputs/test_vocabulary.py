"""An input's tokens must be in the model's vocabulary: JAX looks up an id beyond it without an error."""

import pytest
import tokenizers
from praxis import pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.stdlib import VOCAB_SIZE, StdlibBytesTiny
from spmd_trainer.inputs import text
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

WORDS = ["the", "cat", "sat", "[UNK]", "[EOS]"]


def tokenizer(words: list[str], *, special: str | None = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([token for token in (special,) if token])
    return made


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.build(make_run_config("lm.stdlib.StdlibBytesTiny", ".", mode="inspect"))


def config(path, made: tokenizers.Tokenizer, content: str):
    path.write_text(content)
    return pax_fiddle.Config(
        text.TextInput, name="mine", files=str(path), tokenizer=made, eos_id=4, seq_len=4, batch_size=1
    )


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(job, tmp_path):
    words = WORDS + [f"word{i}" for i in range(VOCAB_SIZE)]
    with pytest.raises(UserError, match=rf"gives tokens from 0 to {len(words) - 1}.*vocab_size is {VOCAB_SIZE}"):
        job.build_input(config(tmp_path / "a.txt", tokenizer(words), "the cat sat"))


def test_an_added_token_beyond_the_model_matters_only_where_a_text_spells_it(job, tmp_path):
    words = WORDS + [f"word{i}" for i in range(VOCAB_SIZE - len(WORDS))]
    made = tokenizer(words, special="<image>")
    assert made.get_vocab_size() == VOCAB_SIZE + 1
    fine = job.build_input(config(tmp_path / "fine.txt", made, "the cat sat on the cat sat the cat"))
    assert fine.get_next().ids.max() < VOCAB_SIZE
    with pytest.raises(UserError, match=r"bad\.txt"):
        job.build_input(config(tmp_path / "bad.txt", made, "the <image> sat on the cat sat the cat")).get_next()


def test_the_experiments_own_inputs_fit(job):
    for input_p in (*job.config.experiment.config.train_datasets, *job.config.experiment.config.eval_datasets):
        assert job.build_input(input_p).vocab_size <= VOCAB_SIZE == StdlibBytesTiny().task().model.lm_tpl.vocab_size
