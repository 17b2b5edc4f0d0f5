"""Settings of `--mode=chat`, and of evaluations with lm-eval; the latter have the names and meanings of lm-eval's own flags."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.settings import Settings, setting, split_names

# Number of bootstrap samples for the standard error of statistics without a closed form. lm-eval takes 100,000, in processes
# that it forks, but a process that runs JAX must not be forked.
BOOTSTRAP_ITERS = 1000


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    """How the harness uses the model: the counterpart of lm-eval's --model_args.

    Attributes:
      tokenizer: path of a tokenizer; None: the tokenizer of the experiment's inputs.
      batch_size: rows per batch; None: as many rows as fit into the number of tokens of a training batch (or minibatch).
      max_length: maximum number of tokens in a row; None: the model's `max_positions`, or the length of a training row.
      add_bos_token: True puts beginning-of-text before every text, False before none; None: as the experiment's inputs do.
      prefix_token_id: the token before texts without a context. None: the token that is put before all texts; if there is none,
        beginning-of-text; if there is none, end-of-text.
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


_judging = functools.partial(setting, group="Judging with lm-eval (--mode=lm_eval)")
_chat = functools.partial(
    setting, group="Talking to a model (--mode=chat)", instead="without --mode, --prompt implies it"
)


def _read_tasks(flag: str, value: Any) -> tuple[str, ...]:
    """Returns the task names in 'a,b', or in several such texts. Each name is returned once."""
    return split_names([value] if isinstance(value, str) else value)


def _read_template(flag: str, value: Any) -> bool | str:
    """Converts 'true' and 'false' to bool; other texts are names of templates, and stay the same."""
    return {"true": True, "false": False, "": False}.get(str(value).lower(), value)


def _read_model_args(flag: str, value: Any) -> ModelArgs:
    """Returns the value of --model_args. Raises UserError if a name is unknown or a value is wrong."""
    if not isinstance(value, str):
        return value
    given = parse_arguments(flag, value)
    known = [field.name for field in dataclasses.fields(ModelArgs)]
    for name in given:
        if name not in known:
            raise UserError(f"{flag}: no {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return ModelArgs(**given)


@dataclasses.dataclass(frozen=True)
class LmEvalSettings(Settings):
    """Settings of an evaluation with lm-eval: which tasks to judge the model with, and how."""

    tasks: tuple[str, ...] = _judging(
        (),
        "Tasks, groups or tags of lm-eval, patterns, or YAML files: a,b. May be repeated.",
        value="NAME,...",
        read=_read_tasks,
    )
    include_path: str | None = _judging(None, "A directory with tasks of your own, as YAML files.", value="DIR")
    num_fewshot: int | None = _judging(None, "Number of examples in the context.", value="N", at_least=0)
    limit: float | None = _judging(None, "Use only the first N examples of each task; below 1, a fraction.", value="N")
    apply_chat_template: str | bool = _judging(
        "",
        "True writes prompts with the tokenizer's chat template; or the name of one of its templates.",
        value="true",
        read=_read_template,
    )
    system_instruction: str | None = _judging(None, "Text of the system message.", value="TEXT")
    fewshot_as_multiturn: bool | None = _judging(
        None, "Write few-shot examples as turns of a conversation. Default: as --apply_chat_template."
    )
    gen_kwargs: Mapping[str, Any] = _judging(
        "",
        "Change how tasks generate text, e.g. max_gen_toks=64,temperature=0.7.",
        value="KEY=VALUE,...",
        read=lambda flag, value: parse_arguments(flag, value) if isinstance(value, str) else value,
    )
    log_samples: bool = _judging(False, "Also write every example with its answers.")
    confirm_run_unsafe_code: bool = _judging(
        False, "Allow tasks that run code: the model's, or what a `!function` of your YAML files names."
    )
    model_args: ModelArgs = _judging(
        "",
        "How the model is used, e.g. max_length=4096,batch_size=64; also tokenizer, add_bos_token and prefix_token_id.",
        value="KEY=VALUE,...",
        read=_read_model_args,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise UserError(
                "no tasks to judge the model with: --mode=lm_eval needs --tasks=NAME,NAME, of lm-eval or of "
                "--include_path=DIR"
            )
        if self.limit is not None and not self.limit > 0:
            raise UserError(f"--limit={self.limit}; give a number of examples, or a fraction below 1")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise UserError("--fewshot_as_multiturn needs --apply_chat_template")


def parse_arguments(flag: str, text: str) -> dict[str, Any]:
    """Parses 'key=value,key=value', or the text of a Python dict, to a dict.

    In the first form, values are Python literals or true, false, null; any other value is kept as text.

    Args:
      flag: the flag's name, for messages.
      text: the flag's value.

    Raises:
      UserError: the text has another form.
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


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


@dataclasses.dataclass(frozen=True)
class ChatSettings(Settings):
    """Settings of `--mode=chat`: what to say to a model, and how it answers. Defaults come from `task.model.generation`."""

    prompt: str | None = _chat(
        None,
        "Answer this and exit, also without --mode. Default: what is typed, or the text of a pipe.",
        value="TEXT",
    )
    system: str | None = _chat(None, "Text of the system message.", value="TEXT")
    max_tokens: int | None = _chat(None, "Most tokens of an answer.", value="N", at_least=1)
    temperature: float | None = _chat(None, "0 takes the most likely token each time.", value="X", at_least=0)
    top_p: float | None = _chat(None, "Keep the most likely tokens up to this probability.", value="P")
