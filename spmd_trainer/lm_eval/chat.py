"""`--mode=chat`: answers prompts with any checkpoint that evaluation can read, on any mesh.

An answer is generated in pieces of a few tokens, so that text appears while the rest is computed. Each piece is one call of the
compiled step with all tokens so far. With a chat template, the model's prompt is the whole conversation. Without a template,
the model continues each prompt separately.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence

import jax
from absl import logging

from spmd_trainer import multihost
from spmd_trainer.decoder.generation.decode import eos_ids
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.inputs.chat_template import template_of
from spmd_trainer.lm_eval.mode import tokenizer_of
from spmd_trainer.lm_eval.requests import Prompt, Requests, Source, no_progress
from spmd_trainer.lm_eval.settings import ChatSettings
from spmd_trainer.lm_eval.steps import training_rows
from spmd_trainer.lm_eval.texts import Texts
from spmd_trainer.models.base import vocabulary_size
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.training import averages, checkpoints
from spmd_trainer.training.job import Job
from spmd_trainer.training.phases import Phase

# Number of tokens per piece of an answer.
_PIECE = 16
# Rows are padded to this many tokens, or twice, four times, ... as many, so that a conversation compiles few programs.
_LEAST_WIDTH = 128
# Seconds that the other processes wait for what a person types at process 0.
_PATIENCE = 24 * 3600.0
_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends."


def chat(job: Job) -> None:
    """Runs `--mode=chat`: answers `--prompt`, or all text piped to stdin, or each typed line. All processes must call it.

    Raises:
      UserError: see `Talk.of_job`; or there is no prompt.
    """
    config = job.config.of(ChatSettings)
    talk = Talk.of_job(job)
    if config.prompt is not None or not multihost.broadcast(sys.stdin.isatty(), name="where prompts come from"):
        text = config.prompt
        if text is None:
            piped = "" if jax.process_index() else sys.stdin.read()
            text = multihost.broadcast(piped, name="the prompt", timeout=_PATIENCE)
        if not text:
            raise UserError('--mode=chat has no prompt: give --prompt="...", write one into its input, or type one')
        _show_answer(talk, text)
        return
    _show(
        [f"step {talk.step}; {'a conversation' if talk.has_template else 'the model continues each prompt'}. {_HELP}"]
    )
    while (line := _typed()) not in (None, "/exit"):
        if line == "/reset":
            talk.reset()
        elif line:
            try:
                _show_answer(talk, line)
            except UserError as error:  # a prompt that is too long doesn't end the conversation
                _show([str(error)])


def _typed() -> str | None:
    """Returns the next line that the user types at process 0; None at the end of the input."""
    line: str | None = None
    if jax.process_index() == 0:
        with contextlib.suppress(EOFError):
            line = input("> ").strip()
    return multihost.broadcast(line, name="the prompt", timeout=_PATIENCE)


def _show_answer(talk: Talk, text: str) -> None:
    _show(talk.answer(text))
    if talk.cut:
        logging.info("the answer was cut %s", talk.cut)


def _show(pieces: Sequence[str] | Iterator[str]) -> None:
    for piece in pieces:
        if jax.process_index() == 0:
            terminal.write(terminal.visible(piece))
    if jax.process_index() == 0:
        terminal.write("\n")


class Talk:
    """A conversation with a model. All processes of a job must make the same calls.

    Attributes:
      step: the training step of the checkpoint.
      has_template: True if prompts are written with the tokenizer's chat template.
      cut: if the last answer was cut before its end: a clause that says where, and how to allow longer answers; otherwise ''.
    """

    def __init__(
        self, requests: Requests, texts: Texts, settings: GenerationSettings, source: Source, *, system: str = ""
    ):
        """Begins the conversation.

        Args:
          requests: runs prompts on the mesh.
          texts: the tokenizer and its chat template.
          settings: generation settings.
          source: the model state.
          system: text of the system message; only with a template.
        """
        self.step = int(source.state.step)
        self.has_template = texts.template is not None
        self.cut = ""
        self._requests, self._texts, self._settings, self._source = requests, texts, settings, source
        self._ends = eos_ids(settings, texts.tokenizer)
        self._seen: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)

    @classmethod
    def of_job(cls, job: Job) -> Talk:
        """Restores the job's checkpoint and begins a conversation.

        Raises:
          UserError: the model can't generate, no input has a tokenizer, the checkpoint is missing, a setting is wrong, or a
            system message is given and the tokenizer has no chat template.
        """
        config, experiment, task = job.config.of(ChatSettings), job.config.experiment, job.task
        given: GenerationSettings | None = getattr(task.model, "generation", None)
        if given is None:
            raise UserError(
                f"the {type(task.model).__name__} of experiment {experiment.label} can't answer: it has no `generation` "
                "settings, as a DecoderLanguageModel has (lm.own_text.OwnText trains one). With --mode=decode_once, models of "
                "praxis continue the texts that decode_datasets() of the experiment returns"
            )
        changed = {name: getattr(config, name) for name in ("max_tokens", "temperature", "top_p")}
        settings = dataclasses.replace(given, num_samples=1, **{k: v for k, v in changed.items() if v is not None})
        vocab_size = vocabulary_size(task)
        settings.check(vocab_size or 0)
        tokenizer, start_id = tokenizer_of(experiment)
        try:
            template_of(tokenizer, None, has_tools=False)
            has_template = True
        except UserError:
            has_template = False
        if config.system and not has_template:
            raise UserError(
                "--system needs a tokenizer with a chat template, and the experiment's has none; leave it out"
            )
        texts = Texts(tokenizer, start_id, vocab_size=vocab_size, chat_template=has_template)
        rows, length = training_rows(job.inputs_shape_dtype)
        requests = Requests(
            task,
            job.partitioner,
            tokens_per_batch=rows * length,
            max_length=task.model.lm_tpl.spec.max_positions or length,
            tokenizer=tokenizer,
        )
        restored = checkpoints.restore_for_inference(job, averages.of(job, decodes=True))
        source = Source(restored.state, f"step {restored.step}", None, no_progress)
        return cls(requests, texts, settings, source, system=config.system or "")

    def reset(self) -> None:
        self._messages = list(self._first)

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a text, piece by piece. With a template, adds text and answer to the conversation.

        Raises:
          UserError: the prompt is too long for the model's rows, or the template can't render the conversation.
        """
        prompt = text
        if self.has_template:
            prompt = self._texts.chat([*self._messages, {"role": "user", "content": text}], add_generation_prompt=True)
        shown = ""
        for whole in self._texts_of(self._texts.encode_prompt(prompt)):
            yield whole[len(shown) :]
            shown = whole
        if self.has_template:
            self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": shown}]

    def _texts_of(self, prompt: list[int]) -> Iterator[str]:
        """Yields the whole answer so far after each piece, except final characters that may be the start of a stop string."""
        room = self._requests.max_length
        piece = min(_PIECE, self._settings.max_tokens)
        if len(prompt) > room - piece:
            fix = "forget the conversation (/reset)" if self._messages != self._first else "shorten it"
            raise UserError(
                f"the prompt has {len(prompt)} tokens, and a row of this model {room}, {piece} of them for the answer; {fix}"
            )
        # Equal prompts get different random numbers, but not where the most likely token is taken.
        occurrence = 0 if self._settings.greedy else self._seen[tuple(prompt)]
        self._seen[tuple(prompt)] += 1
        made: list[int] = []
        held = max((len(stop) - 1 for stop in self._settings.stop), default=0)
        most = min(self._settings.max_tokens, room - len(prompt))
        while len(made) < most:
            # The last piece may go beyond the limit, as another program would have to be compiled for a shorter piece.
            number = min(_PIECE, room - len(prompt) - len(made))
            tokens = self._continued(Prompt((*prompt, *made), occurrence), number, is_first=not made)
            made = [*made, *tokens][:most]
            has_ended = len(tokens) < number or made[-1] in self._ends or len(made) >= most
            text = self._texts.decode(made)
            ends = [found for stop in self._settings.stop if (found := text.find(stop)) >= 0]
            if ends or has_ended:
                self.cut = "" if ends or len(made) < most or made[-1] in self._ends else self._cut_text(most)
                yield text[: min(ends)] if ends else text
                return
            # The last character may be incomplete, because some of its bytes are in the next token.
            yield text[: max(0, len(text) - held)].rstrip("\N{REPLACEMENT CHARACTER}")

    def _cut_text(self, made: int) -> str:
        if made == self._settings.max_tokens:
            return f"after {count_text(made, 'token')}; --max_tokens=N allows more"
        return f"after {count_text(made, 'token')}, where a row of this model ends ({self._requests.max_length} tokens)"

    def _continued(self, prompt: Prompt, number: int, *, is_first: bool) -> list[int]:
        """Returns the next `number` tokens, fewer if the text ends. `is_first`: True reports that the step may be compiling."""
        settings = dataclasses.replace(self._settings, max_tokens=number, stop=())
        length, width = len(prompt.tokens), _LEAST_WIDTH
        while width < length:
            width *= 2
        source = dataclasses.replace(self._source, progress=_first_piece) if is_first else self._source
        least_width = min(width, self._requests.max_length - number)
        return self._requests.continuations([prompt], settings, source, least_width=least_width)[0]


def _first_piece(what: str, total: int) -> Phase:
    """A `Progress` for the first piece of an answer, which reports that the step may be compiling."""
    del what
    return Phase("generating text", "the first answer compiles the program", announce_after=2.0, total=total)
