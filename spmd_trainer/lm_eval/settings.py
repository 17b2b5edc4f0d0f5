"""Settings of an lm-eval evaluation. Names and meanings are those of the lm-eval command."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_trainer.errors import UserError, did_you_mean

# Statistics without a closed form for their standard error are resampled this often. lm-eval takes 100,000, in processes that
# it forks; a process that runs JAX must not be forked.
BOOTSTRAP_ITERS = 1000


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    """How the harness uses the model: the counterpart of lm-eval's --model_args.

    Attributes:
      tokenizer: path of a tokenizer; None: the one of the experiment's inputs.
      batch_size: rows of a batch; None: as many as hold the tokens of a (mini)batch of training.
      max_length: longest row in tokens. None: the model's `max_positions`, or the length of a training row.
      add_bos_token: True puts beginning-of-text before every text, False before none; None: as the experiment's inputs
        do.
      prefix_token_id: token before texts without a context; None: the start token, else beginning-of-text, else
        end-of-text.
    """

    tokenizer: str | None = None
    batch_size: int | None = None
    max_length: int | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("max_length", 2), ("prefix_token_id", 0)):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_number and value >= least):
                raise UserError(f"--model_args: {name}={value!r}; give a whole number, {least} or more")
        if self.add_bos_token not in (None, True, False):
            raise UserError(f"--model_args: add_bos_token={self.add_bos_token!r}; give True or False")


@dataclasses.dataclass(frozen=True)
class LmEvalSettings:
    """Settings of an evaluation.

    Attributes:
      tasks: names of tasks, groups and tags of lm-eval, patterns of such names, or paths of YAML files.
      include_path: directory with further tasks, as YAML files.
      num_fewshot: number of examples in the context; None: each task's default.
      limit: use only the first examples of each task: their number, or below 1 a fraction; None: all.
      apply_chat_template: write prompts with the tokenizer's chat template: True, or the name of one of its templates.
      system_instruction: text of the system message.
      fewshot_as_multiturn: write few-shot examples as turns of a conversation; None: if a chat template is applied.
      gen_kwargs: overrides the tasks' generation settings, e.g. {'max_gen_toks': 64}.
      log_samples: also write every example with its answers.
      confirm_run_unsafe_code: allow tasks that run code written by the model.
      model_args: how the harness uses the model.
    """

    tasks: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    log_samples: bool = False
    confirm_run_unsafe_code: bool = False
    model_args: ModelArgs = ModelArgs()

    def __post_init__(self) -> None:
        if isinstance(self.tasks, str):
            object.__setattr__(self, "tasks", split_names(self.tasks))
        if not self.tasks:
            raise UserError("no tasks to evaluate; give --tasks=NAME,NAME")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError(f"--num_fewshot={self.num_fewshot}; give 0 or more examples")
        if self.limit is not None and not self.limit > 0:
            raise UserError(f"--limit={self.limit}; give a number of examples, or a fraction below 1")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise UserError("--fewshot_as_multiturn needs --apply_chat_template")


def split_names(text: str | Sequence[str]) -> tuple[str, ...]:
    """Splits 'a,b', or several such texts, into distinct names."""
    texts = [text] if isinstance(text, str) else list(text)
    return tuple(dict.fromkeys(name.strip() for part in texts for name in part.split(",") if name.strip()))


def parse_arguments(flag: str, text: str | None) -> dict[str, Any]:
    """Parses 'key=value,key=value', or a JSON object. Values are Python literals or else strings.

    Raises:
      UserError: a part has another form.
    """
    if not text:
        return {}
    if text.lstrip().startswith("{"):
        parsed = _literal(text.strip())
        if not isinstance(parsed, dict):
            raise UserError(f"{flag}={text!r} is not an object; write key=value,key=value")
        return parsed
    found = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not (equals and key.strip()):
            raise UserError(f"{flag}={text!r}: {part!r} is not of the form key=value")
        found[key.strip()] = _literal(value.strip())
    return found


def model_args(text: str | None) -> ModelArgs:
    """Parses --model_args.

    Raises:
      UserError: an unknown name or a wrong value.
    """
    given = parse_arguments("--model_args", text)
    known = [field.name for field in dataclasses.fields(ModelArgs)]
    for name in given:
        if name not in known:
            raise UserError(f"--model_args: no {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return ModelArgs(**given)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
