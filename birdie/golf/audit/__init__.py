"""Audit: whether a score was come by legally, judged from outside, rule by rule, with evidence."""
