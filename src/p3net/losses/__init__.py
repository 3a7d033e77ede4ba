"""The losses of the paper and of the baselines: pure functions of tensors."""
