"""Fronts for other packages: imported by name (docs/migrating.md).

Nothing here patches a class or a module, and importing ratio_kl imports none of it.

    transformers.py    any causal language model; heads.py reads its head
    trl.py             TRL's trainers: trl_head.py puts our head into them, trl_grpo.py the loss
    liger.py           Liger-Kernel's GRPO loss; liger_cross_entropy.py its cross entropy
    verl.py            verl's fused head
    rl_kernel.py       RL-Kernel's operators
"""

from importlib.util import find_spec


def require(package: str, extra: str) -> None:
    """Raise ImportError naming what to install, unless `package` can be imported."""
    if find_spec(package) is None:
        raise ImportError(
            f"this front needs the package {package}, which is not installed: "
            f"pip install {package}, or ratio_kl with its extra [{extra}]",
            name=package,
        )
