"""Training: the loop, its optimizers and schedules, checkpoints, averages of the weights, and profiles."""
