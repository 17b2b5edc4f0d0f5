"""Several texts encoded together have the tokens of each alone, and a bad one is named."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import stdlib_text
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.text_settings import TokenizerConfig
from spmd_trainer.inputs.tokenizer_training import train_tokenizer
from spmd_trainer.inputs.tokenizers import SentencePieceTokenizer

TEXTS = [b"def f(x): return x", b"", "\u00e9\u2211 \U0001f642".encode(), b"a  b\n"]
WHERES = [f"x:{number}" for number in range(len(TEXTS))]


@pytest.fixture(scope="module")
def huggingface():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["</s>"])
    return HuggingFaceTokenizer(made)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    model = tmp_path_factory.mktemp("model") / "small.model"
    train_tokenizer(TokenizerConfig(stdlib_text.stdlib_train_files()[:5], output=model, vocab_size=500))
    return SentencePieceTokenizer(str(model))


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_texts_encoded_together_have_the_tokens_of_each_alone(kind, request):
    tokenizer = request.getfixturevalue(kind)
    found = tokenizer.encode_batch(TEXTS, WHERES)
    assert [one.dtype for one in found] == [np.int32] * len(TEXTS)
    for tokens, text in zip(found, TEXTS, strict=True):
        np.testing.assert_array_equal(tokens, tokenizer.encode(text, ""))
    assert tokenizer.encode_batch([], []) == []


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_text_that_can_not_be_encoded_is_named(kind, request):
    tokenizer = request.getfixturevalue(kind)
    with pytest.raises(UserError, match="x:1 is not UTF-8"):
        tokenizer.encode_batch([b"a", b"\xff"], WHERES[:2])
