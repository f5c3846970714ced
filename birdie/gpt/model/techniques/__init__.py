"""Techniques of the challenge's records, one module each, off by default (docs/techniques.md).

A module holds the formula, its parameters and their initial values, and a `Technique` that declares the rest. Figures
named "measured" are differences in bits per byte, at as many steps, for a GPT of 4 layers × 96 (docs/techniques.md);
numbers with # are pull requests of openai/parameter-golf.
"""
