"""Scoring: bits per byte of what was decoded from bytes."""
