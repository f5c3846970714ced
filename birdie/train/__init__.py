"""Training: optimizers, schedules, checkpoints, the loop. Knows a model by its loss and its parameters' names only."""
