"""The challenge's rules, checked from outside: probes, byte counts, logs, claims, shipped bytes, and lines to read."""
