"""Policy losses of the GRPO/PPO family from hidden states and the lm_head weight, without logits.

`FusedLinearRatioKLLoss` is the loss; `linear_logprob` is the primitive below it.
"""

from .config import RatioKLConfig
from .module import FusedLinearRatioKLLoss
from .objective.entropy import high_entropy_mask
from .objective.metrics import Metrics
from .objective.ratio_kl import linear_ratio_kl, ratio_kl
from .objective.surrogate import LossOutput
from .ops.linear_logprob import LogProbs, linear_logprob

__version__ = "0.1.0"

__all__ = [
    "FusedLinearRatioKLLoss",
    "LogProbs",
    "LossOutput",
    "Metrics",
    "RatioKLConfig",
    "high_entropy_mask",
    "linear_logprob",
    "linear_ratio_kl",
    "ratio_kl",
]
