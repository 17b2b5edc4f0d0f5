"""Pax's `eval_lib`: evaluation and decode jobs."""

from spmd_trainer.errors.absent_names import getter

ABSENT = {
    "evaluate": "use spmd_trainer.evaluate(experiment, job_log_dir), or --mode=eval",
    "decode": "use spmd_trainer.decode(experiment, job_log_dir), or --mode=decode",
    "infer_and_write": "use --mode=infer",
}
__getattr__ = getter(__name__, ABSENT)
