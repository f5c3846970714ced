"""Scoring modes: one file each, with the settings on top and the work below.

    windows            non-overlapping and sliding windows
    streaming          one pass through a rolling KV cache
    ttt_sgd            windows, and SGD on what was scored (test-time training, TTT)
    ttt_lora           documents, and adapters of each
    ttt_multi_phase    the same, and SGD between documents

Recipes and flags need the settings of all modes, so torch, and what a mode shares with others (`gpt.score.windows`,
`sgd`, `documents`), is imported when it scores. A packed script has that of its own mode alone.
"""
