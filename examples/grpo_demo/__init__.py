"""Fine-tune a small pretrained model with GRPO, the loss taken inside the model's forward.

task.py      the sums, the split, the reward rule
policy.py    the model, and the loss inside its forward
rollout.py   group-normalised advantages; the recording that another loss can train on
sampling.py  completions at temperature 1, judged, and scored by the frozen reference
training.py  the optimisation steps and the held-out evaluation
memory.py    peak memory of one forward and backward of the loss
report.py    progress bar, tables, plot
"""
