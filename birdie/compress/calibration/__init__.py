"""What calibration data tell about weights: Hessians, Fisher information, KL, symmetries, refit."""
