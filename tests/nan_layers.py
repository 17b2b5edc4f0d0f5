"""A tiny language model of three repeated layers, one of whose activations makes NaN at a known step."""

import jax.numpy as jnp
from praxis import base_layer, layers, pax_fiddle

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny

# The place of every layer is drawn once, by the run's seed: the layer whose number is above this is one of three.
THRESHOLD = 0.5


class NanGelu(layers.GELU):
    """GELU that goes wrong in the training step `at_step`, in the repetitions whose `place` is the largest.

    Attributes:
      at_step: counted from 1; 0 for never.
      kind: 'forward' (0 / 0), 'infinity' (an infinity that becomes NaN one operation later) or 'backward' (the square root of 0,
        whose value is good and whose gradient isn't).
      above: where `place` is larger.
    """

    at_step: int = 0
    kind: str = "forward"
    above: float = 2.0

    def setup(self) -> None:
        super().setup()
        fixed = [base_layer.WeightHParamsCollection.REQUIRES_MEAN_SYNC]
        for name, init in (
            ("taken", base_layer.WeightInit.Constant(0.0)),
            ("place", base_layer.WeightInit.Uniform(1.0)),
        ):
            hparams = base_layer.WeightHParams((), init=init, dtype=jnp.float32, collections=fixed)
            self.create_variable(name, hparams, trainable=False)

    def __call__(self, inputs):
        taken = self.get_var("taken")
        if not self.do_eval:
            self.update_var("taken", taken + 1)
        wrong = (taken == self.at_step - 1) & (self.get_var("place") > self.above)
        x = super().__call__(inputs)
        zero = jnp.zeros_like(x) * x
        if self.kind == "forward":
            return x + zero / jnp.where(wrong, zero, 1.0)
        if self.kind == "infinity":
            big = jnp.exp(jnp.where(wrong, 1e4, 0.0) + zero)
            return x + (big - big)
        return x + jnp.sqrt(jnp.where(wrong, zero, 1.0 + zero)) - jnp.where(wrong, 0.0, 1.0)


@experiment_registry.register
class NanTiny(StdlibBytesTiny):
    """StdlibBytesTiny with three layers, one of which makes NaN at a step."""

    NUM_LAYERS = 3
    NUM_TRAIN_STEPS = 8
    AT_STEP = 6
    KIND = "forward"
    ABOVE = 2.0
    NUM_EVAL_WINDOWS = 8

    def task(self):
        task_p = super().task()
        layer_p = task_p.model.lm_tpl.stacked_transformer_tpl.block.transformer_layer_params_tpl
        layer_p.tr_fflayer_tpl.activation_tpl = pax_fiddle.Config(
            NanGelu, at_step=self.AT_STEP, kind=self.KIND, above=self.ABOVE
        )
        task_p.train.eval_interval_steps = 0
        task_p.train.summary_interval_steps = 1
        return task_p
