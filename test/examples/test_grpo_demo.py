"""The demo's own logic: reward rule, split, advantages, recording, shift and sampling."""

import math

import pytest
import torch

from examples.grpo_demo.rollout import Recording, Rollout, group_advantages
from examples.grpo_demo.task import Problem, reward, split


@pytest.mark.parametrize(
    ("reply", "finished", "expected"),
    [
        ("8 + 4 = 12", True, 1.0),
        ("8 + 4 = 12", False, 0.5),  # right, but it would have gone on
        ("8 + 4 = 13", True, 0.5),  # the form alone
        ("8 + 4 = 13", False, 0.0),
        ("The answer is 12.", True, 0.5),  # the sum alone
        ("12", True, 0.5),
        ("4 + 8 = 12", True, 0.5),  # another equation than the one asked for
        ("8 + 4 = 12\n\n8 +", False, 0.0),  # the last number counts
        ("8 + 4 = 012", True, 1.0),  # numbers are compared as numbers
        ("8 + 4 = twelve", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_reward_by_hand(reply, finished, expected):
    assert reward(Problem(8, 4), reply, finished) == expected


def test_split_keeps_a_sum_and_its_mirror_image_together():
    training, held_out = split()
    assert sorted(training + held_out) == [(a, b) for a in range(10) for b in range(10)]
    unordered = [{tuple(sorted(problem)) for problem in side} for side in (training, held_out)]
    assert not unordered[0] & unordered[1]
    assert len(unordered[1]) == 15
    assert split() == (training, held_out)


def test_group_advantages_by_hand():
    # Group 1: mean 0.5, deviations -0.5, 0.5, 0, 0, unbiased variance 0.5 / 3. Group 2: alike.
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0])
    unit = 0.5 / (math.sqrt(0.5 / 3) + 1e-4)
    expected = torch.tensor([-unit, unit, 0, 0, 0, 0, 0, 0])
    advantages = group_advantages(rewards, group_size=4)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture
def rollout():
    generator = torch.Generator().manual_seed(0)
    return Rollout(
        prompts=torch.randint(9, (2, 3), generator=generator),
        completions=torch.randint(9, (4, 5), generator=generator),
        mask=torch.rand(4, 5, generator=generator) < 0.5,
        rewards=torch.rand(4, generator=generator),
        advantages=torch.rand(4, generator=generator),
        ref_logps=torch.rand(4, 5, generator=generator),
    )


def test_recording_returns_what_was_saved(tmp_path, rollout):
    path = tmp_path / "rollouts.pt"
    Recording({"seed": 1, "lr": 0.5}, [rollout], [[0.25, -1.0]], 7).save(path)
    loaded = Recording.load(path, {"seed": 1, "lr": 0.5}, torch.device("cpu"))
    assert loaded.losses == [[0.25, -1.0]]
    assert loaded.peak_bytes == 7
    for ours, theirs in zip(loaded.rollouts[0], rollout, strict=True):
        assert torch.equal(ours, theirs)


def test_recording_of_other_options_or_none_says_what_to_run(tmp_path, rollout):
    path = tmp_path / "rollouts.pt"
    with pytest.raises(SystemExit, match=r"No recorded rollouts .*--loss fused"):
        Recording.load(path, {"seed": 1}, torch.device("cpu"))
    Recording({"seed": 1}, [rollout], [[0.0]], 7).save(path)
    with pytest.raises(SystemExit, match=r"recorded with .*'seed': 1.*'seed': 2.*--loss fused"):
        Recording.load(path, {"seed": 2}, torch.device("cpu"))


@pytest.fixture
def model():
    """A Llama with 2 layers of 16: enough for a wrong shift or a wrong cache row to show."""
    transformers = pytest.importorskip("transformers", reason="the extra 'demo' is not installed")
    config = transformers.LlamaConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def test_completion_states_are_the_plain_models_shifted_by_one(model):
    from examples.grpo_demo.policy import completion_states

    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(13, (2, 4), generator=generator)
    completions = torch.randint(13, (6, 5), generator=generator)
    states = completion_states(model.model, prompts, completions)
    sequences = torch.cat([prompts.repeat_interleave(3, dim=0), completions], dim=1)
    plain = model.model(sequences).last_hidden_state[:, 3:-1]
    torch.testing.assert_close(states, plain, rtol=1e-5, atol=1e-5)

    direction = torch.randn(plain.shape, generator=generator)
    parameters = list(model.model.parameters())
    ours = torch.autograd.grad((states * direction).sum(), parameters)
    theirs = torch.autograd.grad((plain * direction).sum(), parameters)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sampled_completions_end_once_and_follow_the_seed(model):
    from examples.grpo_demo.policy import Policy
    from examples.grpo_demo.sampling import sample

    policy = Policy(model, torch.nn.Identity())
    prompts = torch.tensor([[3, 4], [5, 6]])
    # 2 x 40 completions of a nearly uniform model over 13 tokens: some end early, some never.
    completions, mask = sample(policy, prompts, 40, length=8, end=2, seed=3)
    again = sample(policy, prompts, 40, length=8, end=2, seed=3)[0]
    other = sample(policy, prompts, 40, length=8, end=2, seed=4)[0]
    assert torch.equal(completions, again)
    assert not torch.equal(completions, other)
    lengths = set()
    for tokens, active in zip(completions.tolist(), mask.tolist(), strict=True):
        length = tokens.index(2) + 1 if 2 in tokens else 8
        assert active == [t < length for t in range(8)]
        assert set(tokens[length:]) <= {2}
        lengths.add(length)
    assert min(lengths) < 8
    assert any(2 not in tokens for tokens in completions.tolist())
