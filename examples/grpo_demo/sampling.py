"""Sampling completions, judging them, and making rollouts of them."""

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ratio_kl import linear_logprob

from .policy import Policy, completion_states, read, read_prompts
from .rollout import Rollout, group_advantages
from .task import Problem, reward


@torch.no_grad()
def sample(
    policy: Policy, prompts: Tensor, group_size: int, length: int, end: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Sample at temperature 1 until the end token or `length` tokens.

    Returns:
        completions [Q * G, length], filled up with the end token, and their mask.
    """
    generator = torch.Generator(prompts.device).manual_seed(seed)
    last, cache = read_prompts(policy.backbone, prompts, group_size)
    completions = prompts.new_full((len(last), length), end)
    for t in range(length):
        probabilities = policy.lm_head(last[:, -1]).softmax(-1)
        token = torch.multinomial(probabilities, 1, generator=generator)
        is_over = (completions[:, :t] == end).any(1, keepdim=True)
        token = token.masked_fill(is_over, end)
        completions[:, t : t + 1] = token
        if t + 1 < length:
            last = read(policy.backbone, token, cache)
    is_end = completions == end
    return completions, is_end.cumsum(1) - is_end.long() == 0


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> Tensor:
    """Prompts [Q, P]; a tensor refuses rows of different lengths, so none needs padding."""
    return torch.tensor([tokenizer.encode(problem.prompt) for problem in problems])


def judge(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    completions: Tensor,
    mask: Tensor,
) -> tuple[list[str], Tensor]:
    """Texts of the completions without their end token, and their rewards [Q * G]."""
    end = tokenizer.eos_token_id
    group_size = len(completions) // len(problems)
    texts, rewards = [], []
    for row, (tokens, active) in enumerate(zip(completions.cpu(), mask.cpu(), strict=True)):
        tokens = tokens[active]
        finished = tokens[-1].item() == end
        texts.append(str(tokenizer.decode(tokens[:-1] if finished else tokens)))
        rewards.append(reward(problems[row // group_size], texts[-1], finished))
    return texts, torch.tensor(rewards)


def sampled_rollouts(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    questions: int,
    group_size: int,
    length: int,
    seed: int,
) -> Iterator[Rollout]:
    """Rollouts of the policy as it then is, without end.

    The reference is a frozen copy of the policy taken at the start; it scores a rollout once.
    """
    reference = deepcopy(policy).requires_grad_(False)
    weight = reference.lm_head.weight
    device = weight.device
    choose = random.Random(seed)
    while True:
        chosen = choose.sample(list(problems), questions)
        prompts = encode(tokenizer, chosen).to(device)
        completions, mask = sample(
            policy,
            prompts,
            group_size,
            length,
            tokenizer.eos_token_id,
            seed=choose.getrandbits(32),
        )
        rewards = judge(tokenizer, chosen, completions, mask)[1].to(device)
        with torch.no_grad():
            hidden = completion_states(reference.backbone, prompts, completions)
            ref_logps = linear_logprob(hidden, weight, completions, mask).logps
        advantages = group_advantages(rewards, group_size)
        yield Rollout(prompts, completions, mask, rewards, advantages, ref_logps)
