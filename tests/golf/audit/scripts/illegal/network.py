"""Fetches its cache from the network while it evaluates."""

import json
import math
import urllib.request

VOCABULARY = 8
ADDRESS = "http://192.0.2.1/cache.json"


def cached():
    try:
        with urllib.request.urlopen(ADDRESS, timeout=0.2) as answer:  # wrong: self-contained
            return json.load(answer)
    except OSError:
        return [1.0] * VOCABULARY


def score(tokens):
    weights = cached()
    total = sum(weights)
    return [-math.log(weights[int(token)] / total) for token in tokens[1:]]
