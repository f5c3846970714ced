"""Experiments: the ledger of runs, one change against another, sweeps, reports."""
