"""Settings for text generation, from an experiment or from a Hugging Face folder's generation_config.json."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.storage import json_values, reading

GENERATION_CONFIG_FILE = "generation_config.json"
# transformers' default if generation_config.json sets do_sample but not top_k.
_USUAL_TOP_K = 50
# Unsupported options of generation_config.json that change the generated tokens, with their values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "constraints": (),
    "diversity_penalty": (0, 0.0),
    "dola_layers": (),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0),
    "max_length": (20,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0, 0.0),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0, 0.0),
    "sequence_bias": (),
    "suppress_tokens": (),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1, 1.0),
    "watermarking_config": (),
}


@dataclasses.dataclass
class GenerationSettings:
    """Settings for continuing prompts.

    The logits of a step are changed in this order, as in transformers: `repetition_penalty`, `temperature`, `top_k`, `top_p`.

    Attributes:
      max_tokens: maximum number of tokens to generate per row, without the prompt.
      temperature: the logits are divided by it; 0 takes the most likely token (greedy).
      top_k: keep the k most likely tokens, and tokens as likely as the k-th; 0 keeps all.
      top_p: keep the fewest tokens (at least one) whose probabilities, after `top_k`, sum to more than top_p; 1 keeps all.
        Among equally likely tokens, the one with the highest id is kept first.
      repetition_penalty: divides the positive logits of tokens in the prompt or in the generated text, and multiplies their
        negative logits; 1 changes nothing.
      num_samples: number of continuations of each prompt.
      stop: stop strings. A row ends once its generated text (without the prompt) contains one; the text is cut before it.
      eos_ids: tokens that end a row; None takes the end-of-text token of the decode dataset's tokenizer.
      pad_id: token that fills a row after its end.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] | None = None
    pad_id: int = 0

    def check(self, vocab_size: int) -> None:
        """Checks every field.

        Raises:
          UserError: a field has an invalid value; the message names the field, the value and the valid values.
        """
        for name, least in (("max_tokens", 1), ("top_k", 0), ("num_samples", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _wrong(name, value, f"set it to a whole number, {least} or more")
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise _wrong(name, value, "set it to a number")
        if self.temperature < 0:
            raise _wrong("temperature", self.temperature, "set it to 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise _wrong("top_p", self.top_p, "set it above 0 and up to 1 (all tokens)")
        if self.repetition_penalty <= 0:
            raise _wrong("repetition_penalty", self.repetition_penalty, "set it above 0; 1 has no effect")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise _wrong("stop", self.stop, "give a tuple of non-empty texts, e.g. ('\\n\\n',)")
        if self.num_samples > 1 and self.temperature == 0:
            raise _wrong(
                "num_samples", self.num_samples, "greedy samples are all the same: set temperature above 0 too"
            )
        for name, ids in (("eos_ids", () if self.eos_ids is None else self.eos_ids), ("pad_id", (self.pad_id,))):
            if isinstance(ids, int) or not all(_is_id(token, vocab_size) for token in ids):
                shown = ids if name == "eos_ids" else self.pad_id
                kind = "a tuple of tokens" if name == "eos_ids" else "a token"
                raise _wrong(name, shown, f"give {kind} from 0 to {vocab_size - 1}")

    @property
    def greedy(self) -> bool:
        """True if decoding always takes the most likely token and needs no random numbers."""
        return self.temperature == 0


def from_folder(folder: str | os.PathLike[str], **changes: Any) -> GenerationSettings:
    """Reads the settings in a Hugging Face folder's generation_config.json; returns the defaults if there is no such file.

    As in transformers, decoding is greedy unless the file sets do_sample to true; in that case, a missing top_k counts as 50.
    Logs a warning about unsupported options that would change the generated tokens.

    Args:
      folder: the folder.
      **changes: fields of GenerationSettings that take precedence.

    Raises:
      UserError: the file can't be read, is not a JSON object, or an option has a value of the wrong type.
    """
    path = os.path.join(os.fspath(folder), GENERATION_CONFIG_FILE)
    if not reading.exists(path):
        return GenerationSettings(**changes)
    try:
        found = json_values.parse_object(json_values.content_of(path))
    except OSError as error:
        raise UserError(f"{path} can't be read: {reading.problem(path, error)}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON that can be read: {error}") from error
    return from_generation_config(found, path, **changes)


def from_generation_config(config: Mapping[str, Any], path: str, **changes: Any) -> GenerationSettings:
    """Converts the content of a generation_config.json to settings; see `from_folder`. `path` names the file in messages."""
    given = {name: value for name, value in config.items() if value is not None}
    ignored = [
        f"{name}={given[name]!r}"
        for name, neutral in _UNSUPPORTED.items()
        if name in given and given[name] not in neutral
    ]
    if ignored:
        logging.warning("%s asks for %s, which generation does not support: it is ignored", path, ", ".join(ignored))
    try:
        fields = _fields(given)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: an option has a value of the wrong type: {error}") from error
    return GenerationSettings(**{**fields, **changes})


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "eos_token_id" in given:
        eos = given["eos_token_id"]
        fields["eos_ids"] = (eos,) if isinstance(eos, int) else tuple(eos)
    if "repetition_penalty" in given:
        fields["repetition_penalty"] = float(given["repetition_penalty"])
    if "max_new_tokens" in given:
        fields["max_tokens"] = given["max_new_tokens"]
    # Without pad_token_id, transformers pads with the first end-of-text token.
    pad = given.get("pad_token_id", -1)
    fields["pad_id"] = pad if pad != -1 else next(iter(fields.get("eos_ids", ())), 0)
    if given.get("do_sample", False):
        fields["temperature"] = float(given.get("temperature", 1.0))
        fields["top_k"] = given.get("top_k", _USUAL_TOP_K)
        fields["top_p"] = float(given.get("top_p", 1.0))
    stop = given.get("stop_strings", ())
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return fields


def _is_id(token: object, vocab_size: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size


def _wrong(name: str, value: object, right: str) -> UserError:
    return UserError(f"task.model.generation.{name}={value!r}; {right}")
