"""Implements lm-eval's model interface: likelihoods of texts, and generated texts. Imports lm-eval."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.lm_eval.requests import Prompt, Requests, Scored, Source
from spmd_trainer.lm_eval.texts import Texts

# Default number of generated tokens, as in lm-eval's `hf` backend.
_MAX_GEN_TOKS = 256
# Settings of a task that are fields of `GenerationSettings` with the same name, and the fields' types.
_FIELDS = {"top_k": int, "top_p": float, "repetition_penalty": float}
# Unsupported settings, with the values that have no effect and are accepted.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "min_p": (0, 0.0, None),
    "num_return_sequences": (1,),
    "use_cache": (True, False, None),
    "do_sample": (True, False, None),
}


class HarnessModel(TemplateLM):
    """lm-eval's model interface for a model state. All processes of a job must make the same calls.

    Attributes:
      source: the model state, set by the caller before each evaluation.
    """

    source: Source

    def __init__(
        self, requests: Requests, texts: Texts, generation: GenerationSettings | None, info: Mapping[str, Any]
    ):
        """Stores the arguments.

        Args:
          requests: runs requests on the mesh.
          texts: converts between texts and tokens.
          generation: defaults for settings that a task leaves out; None for a model that can't generate.
          info: description of the model, for lm-eval's results.
        """
        super().__init__()
        self._requests = requests
        self._texts = texts
        self._generation = generation
        self._info = dict(info)

    @property
    def eot_token_id(self) -> int:
        return self._texts.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Token id put before texts without a context."""
        return self._texts.prefix_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a row."""
        return self._requests.max_length

    @property
    def tokenizer_name(self) -> str:
        """Text that identifies the tokenizer and the chat template."""
        return f"{self._texts.tokenizer.fingerprint()}{self.chat_template(True)}"

    def get_model_info(self) -> dict[str, Any]:
        return dict(self._info)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the tokens of a text, see `Texts.encode`."""
        del kwargs
        return self._texts.encode(string, special=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the text of the chat template in use, or None without one."""
        del chat_template
        return None if self._texts.template is None else self._texts.template.text

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation by the chat template, see `Texts.chat`."""
        return self._texts.chat(chat_history, add_generation_prompt=add_generation_prompt)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability, and True if greedy decoding gives this continuation.

        Args:
          requests: `args` of each request: (context, continuation).
          disable_tqdm: ignored.

        Raises:
          UserError: a continuation has no tokens, or is longer than `max_length`.
        """
        del disable_tqdm
        pairs = [self._texts.encode_pair(*request.args) for request in requests]
        return self._requests.scores(self._rows(pairs), self.source)

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        del kwargs
        return self._requests.scores(self._rows([request[1:] for request in requests]), self.source)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns log-probabilities of whole texts, scored in windows of `max_length` tokens. A request's `args`: (text,)."""
        del disable_tqdm
        pairs, counts = [], []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self._texts.encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [utils.make_disjoint_window(window) for window in windows]
            pairs += found
            counts.append(len(found))
        scores = iter(self._requests.scores(self._rows(pairs), self.source))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _rows(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Makes rows to score from (context, continuation) pairs. Cuts off the beginning of overlong contexts and warns."""
        longest, cut, rows = self.max_length + 1, 0, []
        for context, continuation in pairs:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens, and rows have at most {self.max_length}; raise "
                    "--model_args=max_length=N if the model takes longer rows"
                )
            tokens = [*context, *continuation]
            cut += len(tokens) > longest
            rows.append(Scored(tuple(tokens[-longest:]), len(continuation)))
        if cut:
            logging.warning(
                "%d of %d texts are longer than %d tokens: the beginning of their context is cut off",
                cut,
                len(rows),
                self.max_length,
            )
        return rows

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates continuations of contexts. A request's `args` are (context, generation settings).

        Raises:
          UserError: a setting is unsupported, or leaves no room for a context.
        """
        del disable_tqdm
        groups: dict[str, list[int]] = collections.defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(request.args[1])].append(index)
        found: dict[int, str] = {}
        for members in groups.values():
            settings, until = self._settings(requests[members[0]].args[1])
            prompts = self._prompts([requests[index].args[0] for index in members], settings)
            tokens = self._requests.continuations(prompts, settings, self.source)
            for index, generated in zip(members, tokens, strict=True):
                found[index] = postprocess_generated_text(self._texts.decode(generated), list(until), None)
        return [found[index] for index in range(len(requests))]

    def _prompts(self, contexts: Sequence[str], settings: GenerationSettings) -> list[Prompt]:
        longest = self.max_length - settings.max_tokens
        if longest < 1:
            raise UserError(
                f"a task generates max_gen_toks={settings.max_tokens} tokens, and rows have {self.max_length} with their "
                "context; give fewer, --gen_kwargs=max_gen_toks=N, or longer rows, --model_args=max_length=N"
            )
        seen: collections.Counter[tuple[int, ...]] = collections.Counter()
        cut, prompts = 0, []
        for context in contexts:
            tokens = self._texts.encode_prompt(context)
            cut += len(tokens) > longest
            kept = tuple(tokens[-longest:])
            # Equal prompts have equal greedy continuations.
            prompts.append(Prompt(kept, 0 if settings.greedy else seen[kept]))
            seen[kept] += 1
        if cut:
            logging.warning(
                "%d of %d contexts are longer than %d tokens: their beginning is cut off", cut, len(prompts), longest
            )
        return prompts

    def _settings(self, given: Mapping[str, Any]) -> tuple[GenerationSettings, tuple[str, ...]]:
        """Converts a task's settings to `GenerationSettings`. Also returns the strings at which generated text is cut."""
        rest = dict(normalize_gen_kwargs(dict(given), _MAX_GEN_TOKS))
        eos = self._texts.spelling(self.eot_token_id)
        until = tuple(handle_stop_sequences(list(rest.pop("until")), eos=eos or None))
        base = self._generation or GenerationSettings()
        fields: dict[str, Any] = {
            "max_tokens": rest.pop("max_gen_toks"),
            "temperature": float(rest.pop("temperature", 0.0)),
            "num_samples": 1,
            "stop": tuple(dict.fromkeys(text for text in until if text)),
            "eos_ids": (self.eot_token_id,) if base.eos_ids is None else base.eos_ids,
        }
        if rest.pop("do_sample", None) is False:
            fields["temperature"] = 0.0
        for name, value in rest.items():
            if name in _FIELDS:
                fields[name] = _FIELDS[name](value)
            elif value not in _WITHOUT_EFFECT.get(name, ()):
                known = [*_FIELDS, "until", "max_gen_toks", "do_sample", "temperature"]
                raise UserError(
                    f"a task generates with {name}={value!r}, which has no counterpart here{did_you_mean(name, known)}; there "
                    f"are {', '.join(known)}"
                )
        return dataclasses.replace(base, **fields), until
