"""Decoding trained checkpoints: every way of praxis', any mesh, files that survive a kill, what is refused."""

import dataclasses
import functools
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from facts import assert_names, raises_naming
from praxis import decoder_hparams
from trained_helpers import STEPS, TINY, logits, make_job, read_lines, restored, trained

from spmd_trainer.errors import UserError
from spmd_trainer.training import checkpoints, decode, start_checks
from spmd_trainer.training.summary_writers import SummaryWriters, read_metrics

# One worker: what these tests share is made once.
pytestmark = pytest.mark.xdist_group("trained")

LIMITS = {"seqlen": 18, "max_decode_steps": 6, "eos_id": 256, "fprop_for_prefix": True}
SAMPLING = functools.partial(decoder_hparams.SampleDecoderHParams, num_samples=2, **LIMITS)
DECODERS = {
    "greedy": decoder_hparams.GreedyDecoderHParams(**LIMITS),
    "temperature": SAMPLING(temperature=0.8, k=0),
    "top_k": SAMPLING(k=10),
    "top_p": SAMPLING(k=0, p=0.9),
    "beam": decoder_hparams.BeamSearchHParams(beam_size=3, **LIMITS),
}
SAMPLES = {"greedy": 1, "beam": 3}
# Seven prompts in batches of three: fewer rows than devices, and the last batch is not full.
PROMPTS = ("decode_datasets[0].num_prompts=7", "decode_datasets[0].batch_size=3")
DECODED = f"decode_out/heldout_prompts/step_{STEPS}.jsonl"


def decode_job(directory, *, decoder="greedy", fields=PROMPTS, customize=lambda config: None, **settings):
    def change(config):
        config.task.model.decoder_tpl = DECODERS[decoder]
        config.task.decode.prng_key_fold_with_batch_index = True
        customize(config)

    settings = {"restore_checkpoint_dir": trained() / "checkpoints", "mode": "decode_once", **settings}
    return make_job(directory, fields=fields, customize=change, **settings)


def decode_once(directory, **arguments):
    decode.decode_once(decode_job(directory, **arguments))
    return read_lines(directory / DECODED)


# Every decoder meets a split vocabulary; the one that draws from all of it meets both meshes.
SPREAD = {decoder: [(2, 2, 2)] for decoder in DECODERS} | {"temperature": [(1, 4, 2), (2, 2, 2)], "greedy": [(1, 4, 2)]}


@pytest.mark.parametrize(
    "decoder", [name if name == "top_p" else pytest.param(name, marks=pytest.mark.full) for name in DECODERS]
)
def test_any_mesh_decodes_the_same_from_the_same_seed(decoder, tmp_path):
    alone = decode_once(tmp_path / "alone", decoder=decoder, mesh=(1, 1, 1))
    assert [record["index"] for record in alone] == list(range(7))
    for record in alone:
        assert len(record["outputs"]) == len(record["scores"]) == len(record["ids"]) == SAMPLES.get(decoder, 2)
        assert record["output"] == record["outputs"][0]
        assert record["score"] == max(record["scores"])
        assert all(0 < len(ids) <= 6 for ids in record["ids"])
    for mesh in SPREAD[decoder]:
        spread = decode_once(tmp_path / str(mesh), decoder=decoder, mesh=mesh)
        for ours, theirs in zip(alone, spread, strict=True):
            assert ours["ids"] == theirs["ids"], mesh
            np.testing.assert_allclose(ours["scores"], theirs["scores"], rtol=1e-4)


@pytest.mark.full
def test_key_value_caches_are_split_over_rows_and_heads(tmp_path):
    job = decode_job(tmp_path, fields=("decode_datasets[0].batch_size=8",))
    dataset = decode.DecodeDataset(job, job.config.experiment.config.decode_datasets[0], 0)
    loops = [line for line in dataset.lower().compile().as_text().splitlines() if " while(" in line]
    # Keys and values of two layers: 8 rows over 'data' (4), 12 + 6 tokens, 2 heads over 'mdl' (2), width 16.
    carried = [re.findall(r"f32\[([\d,]+)\]", line.split(" while(")[0]) for line in loops]
    assert max(shapes.count("2,18,1,16") for shapes in carried) >= 4
    assert not any(re.match(r"8,18,|\d+,18,2,16", shape) for shapes in carried for shape in shapes)


@pytest.mark.full
def test_greedy_scores_are_the_model_s_own_log_probabilities(tmp_path):
    """Prompt and continuation through the model at once, without caches: same ids, same log-probabilities."""
    job, state = restored((1, 1, 1))
    for record in decode_once(tmp_path, mesh=(1, 1, 1))[:3]:
        text = np.array([256, *record["prompt"].encode(), *record["ids"][0]], np.int32)
        ids, labels = text[None, :-1], text[1:]
        logprobs = np.asarray(jax.nn.log_softmax(logits(job, state, ids)[0]), np.float64)
        start = len(text) - 1 - len(record["ids"][0])
        assert logprobs[start:].argmax(-1).tolist() == record["ids"][0]
        total = np.take_along_axis(logprobs, labels[:, None], -1)[start:].sum()
        assert record["score"] == pytest.approx(total, rel=1e-4)


def without_fprop(steps):
    """A change of a config: praxis feeds the prompts to the model in its decode loop of so many steps."""

    def change(config):
        decoder_tpl = dataclasses.replace(DECODERS["greedy"], fprop_for_prefix=False, max_decode_steps=steps)
        config.task.model.decoder_tpl = decoder_tpl

    return change


@pytest.mark.full
def test_a_decode_without_fprop_for_prefix_ends_where_praxis_stopped(tmp_path):
    """Then praxis' steps count the prompt's tokens too: 15 steps write 16 tokens, of 18. What was not written is no output."""

    whole = decode_once(tmp_path / "whole", mesh=(1, 1, 1))
    cut = decode_once(tmp_path / "cut", mesh=(1, 1, 1), customize=without_fprop(15))
    for record, longer in zip(cut, whole, strict=True):
        prompt = 1 + len(record["prompt"].encode())  # with the start token
        assert len(record["ids"][0]) == 16 - prompt or record["ids"][0][-1] == 256
        common = min(len(record["ids"][0]), len(longer["ids"][0]))
        assert record["ids"][0][:common] == longer["ids"][0][:common]
        assert "\0" not in record["output"]
        assert record["score"] < 0


@pytest.mark.full
def test_a_prompt_that_takes_all_decode_steps_is_refused(tmp_path):
    with raises_naming(UserError, "prompt 0", "12 tokens", "max_decode_steps=6", "fprop_for_prefix", "allows 6"):
        decode_once(tmp_path, mesh=(1, 1, 1), customize=without_fprop(6))


@pytest.mark.full
def test_a_decode_killed_midway_goes_on_where_it_stopped(tmp_path, monkeypatch):
    fields = ("decode_datasets[0].num_prompts=36", "decode_datasets[0].batch_size=1")
    options = (*fields, "task.decode.prng_key_fold_with_batch_index=True")
    process = start(tmp_path, "decode_once", *options)
    parts = tmp_path / "decode_out" / "heldout_prompts" / f"step_{STEPS}.parts"
    deadline = time.monotonic() + 300
    while not (parts / "000003.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert not (tmp_path / DECODED).exists()
    before = {path: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert 4 <= len(before) < 36

    seen = []
    finish = decode.DecodeOutput.finish

    def look_first(self, batches):
        seen.append({path: path.stat().st_mtime_ns for path in before})
        return finish(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(decode.DecodeOutput, "finish", look_first)
        records = decode_once(tmp_path, fields=fields)
    assert seen == [before]
    assert [record["index"] for record in records] == list(range(36))
    assert not parts.exists()
    assert read_metrics(tmp_path, "decode_heldout_prompts")[STEPS]["Metrics/num_decoded"] == 36
    assert decode_once(tmp_path / "whole", fields=fields) == records


@pytest.mark.full
def test_what_is_decoded_is_not_decoded_again_unless_something_changed(tmp_path):
    decode_once(tmp_path)
    first = (tmp_path / DECODED).stat().st_mtime_ns
    decode_once(tmp_path, mesh=(1, 8, 1))
    assert (tmp_path / DECODED).stat().st_mtime_ns == first
    assert len((tmp_path / "summaries/decode_heldout_prompts/metrics.jsonl").read_text().splitlines()) == 1
    records = decode_once(tmp_path, fields=("decode_datasets[0].num_prompts=2",))
    assert len(records) == 2


@pytest.mark.full
def test_infer_draws_from_its_own_seed(tmp_path):
    sampling = {"decoder": "temperature", "mesh": (1, 1, 1)}

    def ids(name, *fields, **settings):
        records = decode_once(tmp_path / name, fields=(*PROMPTS, *fields), **sampling, **settings)
        return [record["ids"] for record in records]

    decoded = ids("decoded", "task.decode.random_seed=7")
    assert ids("inferred", "task.infer.random_seed=7", mode="infer") == decoded
    # In the same directory: another seed is other work, and the decode's own seed says nothing.
    other = ids("inferred", "task.infer.random_seed=8", mode="infer")
    assert other != decoded
    assert ids("again", "task.infer.random_seed=8", "task.decode.random_seed=7", mode="infer") == other


@pytest.mark.full
def test_decode_during_training_gives_the_file_that_a_job_gives(tmp_path):
    from spmd_trainer.training import train

    fields = ("task.train.decode_interval_steps=4", "task.train.num_train_steps=4", *PROMPTS)
    train.train(make_job(tmp_path, fields=fields, decode_during_train=True))
    during = read_lines(tmp_path / "decode_out/heldout_prompts/step_4.jsonl")
    job = make_job(
        tmp_path / "job", fields=PROMPTS, restore_checkpoint_dir=trained() / "checkpoints", restore_checkpoint_step=4
    )
    decode.decode_checkpoints(job)
    assert read_lines(tmp_path / "job/decode_out/heldout_prompts/step_4.jsonl") == during


def too_long(tmp_path):
    for name, text in (("a.txt", "import os"), ("b.txt", "def f(x):"), ("c.txt", "class Something(Else):\n")):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt")]
    return (
        f"decode_datasets[0].files={files}",
        "decode_datasets[0].num_prompts=None",
        "decode_datasets[0].prefix_len=18",
    )


@pytest.mark.full
def test_a_prompt_that_is_too_long_is_named_and_what_was_decoded_stays(tmp_path):
    earlier = tmp_path / DECODED
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}\n")
    process = start(tmp_path, "decode_once", *too_long(tmp_path), "decode_datasets[0].batch_size=1")
    _, log = process.communicate(timeout=300)
    assert process.returncode == 2, log
    assert "Traceback" not in log
    message = log.splitlines()[-1]
    assert_names(message, "prompt 2", "heldout_prompts", "18 tokens", "task.model.decoder_tpl.seqlen=18", "allows 17")
    assert earlier.read_text() == "{}\n"


def test_prompts_wider_than_the_model_decodes_are_refused(tmp_path):
    with raises_naming(UserError, "heldout_prompts", "up to 19 tokens", "task.model.decoder_tpl.seqlen=18"):
        decode_once(tmp_path, fields=("decode_datasets[0].prefix_len=19",))


@pytest.mark.full
def test_an_empty_dataset_is_refused(tmp_path, monkeypatch):
    job = decode_job(tmp_path)
    state = checkpoints.restore_for_inference(job, "none").state
    decodes = decode.Decodes(job, SummaryWriters(tmp_path))
    monkeypatch.setattr(decode.DecodeDataset, "_batches", lambda self: iter(()))
    with raises_naming(UserError, "decode dataset heldout_prompts", "empty"):
        decodes.run(state, STEPS)


def test_an_experiment_without_decode_datasets_is_refused(tmp_path):
    job = decode_job(tmp_path, customize=lambda config: config.decode_datasets.clear())
    with raises_naming(UserError, job.config.experiment.label, "no decode datasets", "decode_datasets()"):
        start_checks.check_settings(job.config)


def start(directory, mode, *fields):
    """The command on the trained checkpoints, as a process of its own."""
    command = [
        sys.executable,
        "-m",
        "spmd_trainer.main",
        f"--exp={TINY}",
        f"--job_log_dir={directory}",
        f"--mode={mode}",
    ]
    command += [f"--restore_checkpoint_dir={trained() / 'checkpoints'}", *(f"--fdl.set={field}" for field in fields)]
    # XLA_FLAGS go along: the same compiled program gives the same scores to the last bit.
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
