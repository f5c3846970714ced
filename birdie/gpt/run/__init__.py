"""Recipes and what runs them: presets, environment, preflight, training pipeline, evaluation, fine-tuning."""
