"""What of a GPT can change places without changing the function, as `symmetry_units` reads it.

In each block: hidden units of the MLP, value channels within a head, query heads that share a key–value head, key–value
heads with their query heads. Hidden units and value channels can be rescaled as well: the square of ReLU takes a unit
times a to a², SwiGLU and attention are linear in one of their factors. Exclusive attention is not: it normalises
values. Layers whose values are added to one another move theirs together.
"""

from birdie.model.config import GPTConfig

Member = tuple[str | int, ...]
Symmetry = tuple[Member, ...]


def symmetries(config: GPTConfig) -> tuple[Symmetry, ...]:
    """The declarations, in the order of layers."""
    found: list[Symmetry] = []
    groups = _value_groups(config)
    for layer in range(config.num_layers):
        found.append(_hidden(config, layer))
        # What another function than softmax does with heads is not known here.
        if config.attention == "softmax":
            found += [each for group in groups if group[0] == layer for each in _heads(config, group)]
    return tuple(found)


def _value_groups(config: GPTConfig) -> list[list[int]]:
    """Layers whose values share channels; most are alone."""
    layers = list(range(config.num_layers))
    if config.value_residual:
        return [layers]
    embedded = sorted(set(config.value_embed_layers))
    return [[layer] for layer in layers if layer not in embedded] + ([embedded] if embedded else [])


def _hidden(config: GPTConfig, layer: int) -> Symmetry:
    hidden = config.mlp_hidden
    up, gate, down = (f"blocks.{layer}.mlp.{name}.weight" for name in ("fc", "gate", "proj"))
    if config.activation == "swiglu":
        return (up, 0, 1, 0, hidden, 1), (gate, 0, 1, 0, hidden, 0), (down, 1, 1, 0, hidden, -1)
    return (up, 0, 1, 0, hidden, 1), (down, 1, 1, 0, hidden, -2)


def _heads(config: GPTConfig, layers: list[int]) -> list[Symmetry]:
    kv_heads, d = config.num_kv_heads, config.head_dim
    queries = config.num_heads // kv_heads
    embedded = bool(config.value_embed_layers) and any(layer in config.value_embed_layers for layer in layers)
    table = "value_embed.proj.weight"
    # Layers of a recursion of values normalise them only if they are exclusive.
    scaled = all(layer < config.num_layers - config.xsa_last_n for layer in layers)
    found: list[Symmetry] = []
    for j in range(kv_heads):
        first, last = queries * j, queries * (j + 1)
        rows, readers = (d * j, d * (j + 1)), [(d * h, d * (h + 1)) for h in range(first, last)]
        members: list[Member] = [(f"blocks.{i}.attn.c_v.weight", 0, 1, *rows) for i in layers]
        members += [(table, 0, 1, *rows)] if embedded else []
        consumers: list[Member] = [
            (f"blocks.{i}.attn.proj.weight", 1, 1, *columns) for i in layers for columns in readers
        ]
        if scaled:
            members, consumers = [(*each, 1) for each in members], [(*each, -1) for each in consumers]
        found.append((*members, *consumers))
        if queries > 1:
            found += [_queries(config, i, first, last) for i in layers]
    if kv_heads > 1:
        together: list[Member] = [(table, 0, d)] if embedded else []
        for i in layers:
            q, k, v, out = (f"blocks.{i}.attn.{name}.weight" for name in ("c_q", "c_k", "c_v", "proj"))
            together += [(q, 0, d * queries), (k, 0, d), (v, 0, d), (out, 1, d * queries)]
            together += [(name, 0, queries) for name in _per_head(config, i)]
        found.append(tuple(together))
    return found


def _queries(config: GPTConfig, layer: int, first: int, last: int) -> Symmetry:
    """Query heads that read one key–value head."""
    d = config.head_dim
    span = (d, d * first, d * last)
    q, out = (f"blocks.{layer}.attn.{name}.weight" for name in ("c_q", "proj"))
    return (q, 0, *span), (out, 1, *span), *((name, 0, 1, first, last) for name in _per_head(config, layer))


def _per_head(config: GPTConfig, layer: int) -> list[str]:
    """Tensors of a layer with a row for each query head."""
    gate = [] if config.attn_gate == "none" else [f"blocks.{layer}.attn.head_gate"]
    return [f"blocks.{layer}.attn.q_gain", *gate]
