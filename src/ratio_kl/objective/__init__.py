"""The loss between the passes: plain torch on per-token tensors, with no vocabulary in sight."""
