"""TRL's trainers on this library.

    trainer = GRPOTrainer(...)  # or RLOOTrainer, SFTTrainer, DPOTrainer, KTOTrainer
    use_ratio_kl(trainer)  # its fused head is this library's from here on
    trainer.train()

`RatioKLGRPOTrainer` is GRPOTrainer with the whole loss here, so that tokens whose gradient is zero
are left out of backward too. `add_fused_lm_head` is TRL's function of that name.
"""

from .trl_grpo import RatioKLGRPOTrainer, loss_options
from .trl_head import add_fused_lm_head, use_ratio_kl

__all__ = ["RatioKLGRPOTrainer", "add_fused_lm_head", "loss_options", "use_ratio_kl"]
