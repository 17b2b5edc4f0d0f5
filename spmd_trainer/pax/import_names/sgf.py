"""Pax's `sgf`: stochastic gradients, among them differentially private ones. This trainer has the gradient of the mean loss."""

from spmd_trainer.errors.absent_names import getter

_GRADIENT = "gradients are those of the mean loss over the batch; steps.step_fns.train_step takes a grad_fn of your own"
ABSENT = {
    "BaseStochasticGradient": _GRADIENT,
    "StandardGradient": _GRADIENT,
    "DpSgdStochasticGradient": _GRADIENT,
    "MicrobatchDpSgdStochasticGradient": _GRADIENT,
    "AugMulDpSgdStochasticGradient": _GRADIENT,
    "PerLayerDpSgdStochasticGradient": _GRADIENT,
    "PercoreClippedDpSgdGradient": _GRADIENT,
    "GhostClippingDpSgdStochasticGradient": _GRADIENT,
    "GradAuxInfo": _GRADIENT,
    "DPGradAuxInfo": _GRADIENT,
}
__getattr__ = getter(__name__, ABSENT)
