"""Pax's `base_inference_runner`: what `--mode=infer` runs. Here it decodes like `decode_once`."""

from spmd_trainer.errors.absent_names import getter

ABSENT = {
    "BaseInferenceRunner": "--mode=infer decodes like decode_once; override model.decode and process_decode_out",
}
__getattr__ = getter(__name__, ABSENT)
