"""The learners, under Pax's import name. The code is in `optim/learner.py` and `optim/masks.py`."""

from __future__ import annotations

from spmd_trainer.optim.learner import Learner, MultiOptimizerLearner, extract_ema, global_norm, has_ema, reset_ema
from spmd_trainer.optim.masks import get_excluded_var_mask_for_grad, get_excluded_var_mask_for_opt

__all__ = [
    "Learner",
    "MultiOptimizerLearner",
    "extract_ema",
    "get_excluded_var_mask_for_grad",
    "get_excluded_var_mask_for_opt",
    "global_norm",
    "has_ema",
    "reset_ema",
]
