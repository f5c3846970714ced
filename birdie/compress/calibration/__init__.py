"""Calibration: Hessians and Fisher information of weights, KL on held-out batches, symmetries."""
