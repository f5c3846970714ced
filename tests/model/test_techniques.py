"""Each technique of the records is its formula, is off unless asked for, and respects documents and the future.

The reference below is written from the formulas, one sequence and one position at a time, in float64.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch

from birdie.errors import ConfigError
from birdie.model.attention import register, softmax
from birdie.model.cache import Cache
from birdie.model.config import GPTConfig
from birdie.model.evidence import Looping, evidence
from birdie.model.gpt import GPT
from birdie.train.groups import split_parameters
from tests.tiny_run import EVERYTHING

V, BOS = 50, 1
SMALL = GPTConfig(vocab_size=V, num_layers=5, model_dim=32, num_heads=4, num_kv_heads=2, tied_embed_init_std=0.5)
TECHNIQUES: dict[str, dict[str, Any]] = {
    "bigram": {"bigram_vocab_size": 17, "bigram_dim": 8},
    "trigram": {"bigram_vocab_size": 17, "bigram_dim": 8, "trigram": True},
    "smear, fixed": {"smear": "fixed"},
    "smear, gated": {"smear": "gated", "gate_window": 6},
    "factored embedding": {"embed_dim": 12},
    "factored embedding, untied": {"embed_dim": 12, "tie_embeddings": False},
    "partial rotation": {"rope_dims": 4},
    "longer than trained": {"rope_dims": 4, "rope_train_seq_len": 5},
    "XSA on the last": {"xsa_last_n": 2},
    "value embeddings": {"value_embed_layers": (1, 4), "value_embed_dim": 8},
    "value residual": {"value_residual": True},
    "output gate": {"attn_gate": "output", "gate_window": 6},
    "dense gate": {"attn_gate": "dense"},
    "sparse gate": {"attn_gate": "sparse", "gate_window": 6, "sparse_gate_scale": 0.5},
    "isolated documents": {"isolate_documents": True},
    "leaky ReLU²": {"activation": "leaky_relu2"},
    "SwiGLU": {"activation": "swiglu", "mlp_mult": 1.5},
    "LN scale": {"ln_scale": True},
    "gated skips": {"skip_gates": True},
    "loops": {"num_loops": 2, "loop_start": 1, "loop_end": 2},
    "joint": {"parallel_start_layer": 3},
    "lanes": {"parallel": "lanes", "parallel_start_layer": 3},
    "polynomial softcap": {"softcap": "poly", "logit_softcap": 2.0},
    "asymmetric softcap": {"softcap": "asymmetric", "logit_softcap": 2.0},
}
ALL = {**TECHNIQUES, "everything": EVERYTHING, "nothing": {}}


def changed(change: dict[str, Any]) -> GPTConfig:
    return dataclasses.replace(SMALL, **change)


def randomized(config: GPTConfig, seed: int = 0) -> GPT:
    """A model none of whose parameters is zero or one, so that each has its effect."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.ndim == 2 else 0.5))
            if name == "softcaps":
                p.copy_(torch.tensor([2.0, 3.0]))
    return model


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Ids with documents that begin at the third and the seventh place."""
    ids = torch.randint(2, V, shape, generator=torch.Generator().manual_seed(seed))
    ids[..., 2::4] = BOS
    return ids


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


Weights = dict[str, torch.Tensor]


def embedded(c: GPTConfig, w: Weights, ids: list[int]) -> torch.Tensor:
    rows = []
    for t, token in enumerate(ids):
        x = w["tok_emb.weight"][token]
        if c.embed_dim:
            x = w["embed_proj.weight"] @ x
        if c.bigram_vocab_size:
            last = c.bigram_vocab_size - 1
            pair = t >= 1 and token != BOS
            triple = pair and t >= 2 and ids[t - 1] != BOS
            found = w["bigram.embed.weight"][((36313 * token) ^ (27191 * ids[t - 1])) % last if pair else last]
            if c.trigram:
                mixed = (36313 * token) ^ (27191 * ids[t - 1]) ^ (51497 * ids[t - 2])
                found = found + w["bigram.embed.weight"][mixed % last if triple else last]
            x = x + w["bigram.scale"] * (w["bigram.proj.weight"] @ found)
        rows.append(x)
    x = torch.stack(rows)
    inside = [t > 0 and token != BOS for t, token in enumerate(ids)]
    if c.smear == "gated":
        share = torch.sigmoid(x[:, : c.gate_window] @ w["smear.gate"][0])
        extra = [w["smear.amount"] * share[t] * x[t - 1] * inside[t] for t in range(len(ids))]
        x = x + torch.stack(extra)
    x = rms(x)
    if c.smear == "fixed":
        g = torch.sigmoid(w["smear.gate"])
        x = torch.stack([(1 - g) * x[t] + g * x[t - 1] if inside[t] else x[t] for t in range(len(ids))])
    return x


def attention(
    c: GPTConfig, w: Weights, i: int, x: torch.Tensor, ids: list[int], first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    length, d, p = len(ids), c.head_dim, f"blocks.{i}.attn."
    q, k, v = (x @ w[f"{p}c_{n}.weight"].T for n in "qkv")
    if i in c.value_embed_layers:
        scale = w["value_embed.scale"] * w["value_embed.layer_scales"][c.value_embed_layers.index(i)]
        v = v + scale * (w["value_embed.embed.weight"][ids] @ w["value_embed.proj.weight"].T)
    own = v
    if c.value_residual and first is not None:
        v = w[p + "value_mix"][0] * first + w[p + "value_mix"][1] * v
    n, base = c.rope_dims or d, c.rope_base
    if c.rope_train_seq_len and length > c.rope_train_seq_len:
        base = base * (length / c.rope_train_seq_len) ** (n / (n - 2))

    def turn(z: torch.Tensor, t: int) -> torch.Tensor:
        out = z.clone()
        for j in range(n // 2):
            angle, a, b = t / base ** (2 * j / n), z[j], z[j + n // 2]
            out[j] = a * math.cos(angle) + b * math.sin(angle)
            out[j + n // 2] = -a * math.sin(angle) + b * math.cos(angle)
        return out

    document = [ids[: t + 1].count(BOS) for t in range(length)]
    heads = []
    for h in range(c.num_heads):
        kv = h // (c.num_heads // c.num_kv_heads)
        qh, kh = rms(q[:, h * d : (h + 1) * d]), rms(k[:, kv * d : (kv + 1) * d])
        vh = v[:, kv * d : (kv + 1) * d]
        rows = []
        for t in range(length):
            seen = [s for s in range(t + 1) if document[s] == document[t] or not c.isolate_documents]
            query = turn(qh[t], t) * w[p + "q_gain"][h]
            shares = torch.stack([query @ turn(kh[s], s) for s in seen]).div(math.sqrt(d)).softmax(0)
            y = shares @ vh[seen]
            if i >= c.num_layers - c.xsa_last_n:
                unit = vh[t] / vh[t].norm()
                y = y - (y @ unit) * unit
            if c.attn_gate != "none":
                window = c.model_dim if c.attn_gate == "dense" else c.gate_window
                inner = (c.sparse_gate_scale if c.attn_gate == "sparse" else 1) * (
                    w[p + "head_gate"][h] @ x[t, :window]
                )
                y = y * torch.sigmoid(inner) * (2 if c.attn_gate == "output" else 1)
            rows.append(y)
        heads.append(torch.stack(rows))
    return torch.cat(heads, -1) @ w[p + "proj.weight"].T, own


def mlp(c: GPTConfig, w: Weights, i: int, x: torch.Tensor) -> torch.Tensor:
    p = f"blocks.{i}.mlp."
    u = x @ w[p + "fc.weight"].T
    if c.activation == "swiglu":
        gate = x @ w[p + "gate.weight"].T
        return (gate * torch.sigmoid(gate) * u) @ w[p + "proj.weight"].T
    slope = 0.5 if c.activation == "leaky_relu2" else 0.0
    return torch.where(u > 0, u, slope * u) ** 2 @ w[p + "proj.weight"].T


def reference(model: GPT, ids: list[int]) -> torch.Tensor:
    c, w = model.config, {name: p.detach().double() for name, p in model.named_parameters()}
    x0 = x = embedded(c, w, ids)
    segment = list(range(c.loop_start, c.loop_end + 1))
    order = [*range(c.loop_end + 1), *segment * c.num_loops, *range(c.loop_end + 1, c.num_layers)]
    pushed: list[torch.Tensor] = []
    lanes: list[torch.Tensor] | None = None
    first = None
    for place, i in enumerate(order):
        b, half = f"blocks.{i}.", len(order) // 2
        ln = 1 / math.sqrt(i + 1) if c.ln_scale else 1.0
        if place >= half and pushed:
            skip = w["skip_weights"][place - half] * pushed.pop()
            stream = x if lanes is None else lanes[0]
            if c.skip_gates:
                g = torch.sigmoid(w["skip_gates"][place - half])
                stream = g * stream + (1 - g) * skip
            else:
                stream = stream + skip
            x = stream
            if lanes is not None:
                lanes[0] = stream
        if c.parallel == "lanes" and i == c.parallel_start_layer:
            lanes = [x, x]
        mix = w[b + "resid_mix"]
        stream = mix[0] * (x if lanes is None else lanes[0]) + mix[1] * x0
        attended, own = attention(c, w, i, rms(stream) * ln, ids, first)
        attended = w[b + "attn_scale"] * attended
        first = own if first is None else first
        if lanes is not None:
            m = w[b + "mlp_scale"] * mlp(c, w, i, rms(lanes[1]) * ln)
            r, write = w["lane_keeps"][i], w["lane_writes"][i]
            lanes = [r[n] * lanes[n] + write[0, n] * attended + write[1, n] * m for n in (0, 1)]
        else:
            joint = c.parallel_start_layer is not None and i >= c.parallel_start_layer
            x = stream + attended
            x = x + w[b + "mlp_scale"] * mlp(c, w, i, rms(stream if joint else x) * ln)
        if place < half:
            pushed.append(x)
    x = rms(x if lanes is None else (lanes[0] + lanes[1]) / 2)
    if not c.tie_embeddings:
        logits = x @ w["lm_head.weight"].T
    else:
        logits = (x @ w["embed_proj.weight"] if c.embed_dim else x) @ w["tok_emb.weight"].T
    cap = c.logit_softcap
    if c.softcap == "poly":
        z = (logits / cap).clamp(-2, 2)
        return cap * (z - z**3 / 3 + z**5 / 15).clamp(-1, 1)
    if c.softcap == "asymmetric":
        above, below = w["softcaps"]
        return torch.where(logits > 0, above * torch.tanh(logits / above), below * torch.tanh(logits / below))
    return cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_the_forward_is_the_formula(change: dict[str, Any]) -> None:
    model, ids = randomized(changed(change)), tokens(2, 9)
    expected = torch.stack([reference(model, row.tolist()) for row in ids]).float()
    torch.testing.assert_close(model(ids), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("change", TECHNIQUES.values(), ids=TECHNIQUES)
def test_on_is_not_off(change: dict[str, Any]) -> None:
    """With the same weights wherever both have them."""
    on, off, ids = randomized(changed(change)), GPT(SMALL), tokens(1, 12)
    held = on.state_dict()
    if on.config.num_skips == SMALL.num_skips:
        fitting = {
            name: held[name] for name, p in off.state_dict().items() if name in held and held[name].shape == p.shape
        }
        off.load_state_dict(off.state_dict() | fitting)
    assert (on(ids) - off(ids)).abs().max() > 1e-3


@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_every_parameter_has_one_group_and_a_gradient(change: dict[str, Any]) -> None:
    model, ids = randomized(changed(change)), tokens(3, 16)
    groups = split_parameters(model.named_parameters())
    owned = sorted(name for members in groups.values() for name in members)
    assert owned == sorted(name for name, _ in model.named_parameters())
    assert all(p.ndim == 2 for p in groups["matrices"].values())
    model.loss(ids, ids.roll(-1, 1)).backward()
    # of a value residual, the first layer has nothing to mix with
    dead = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert dead <= {"blocks.0.attn.value_mix"}


@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_a_new_model_learns_in_every_part(change: dict[str, Any]) -> None:
    """From its own first values: nothing is left at zero because two factors of zero wait for one another."""
    torch.manual_seed(0)
    model, ids = GPT(changed(change)), tokens(4, 16)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(6):
        optimizer.zero_grad()
        model.loss(ids, ids.roll(-1, 1)).backward()
        optimizer.step()
    still = {name for name, p in model.named_parameters() if torch.equal(p, start[name])}
    assert still <= {"blocks.0.attn.value_mix"}


@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_the_future_has_no_influence(change: dict[str, Any]) -> None:
    model, ids = randomized(changed(change)), tokens(1, 12)
    with torch.no_grad():
        before = model(ids)
        for place in (1, 5, 6, 11):
            other = ids.clone()
            other[:, place:] = (other[:, place:] + 7) % V
            torch.testing.assert_close(model(other)[:, :place], before[:, :place])


@pytest.mark.parametrize("name", ["bigram", "trigram", "smear, fixed", "smear, gated", "everything"])
def test_nothing_is_mixed_across_the_beginning_of_a_document(name: str) -> None:
    """Attention is kept within documents too: then what came before a BOS leaves no trace after it."""
    model, ids = randomized(changed({**ALL[name], "isolate_documents": True})), tokens(1, 12)
    other = ids.clone()
    other[:, :6] = tokens(1, 6, seed=9)
    other[:, 6] = ids[:, 6] = BOS
    with torch.no_grad():
        torch.testing.assert_close(model(other)[:, 6:], model(ids)[:, 6:])
        assert not torch.allclose(model(other)[:, :6], model(ids)[:, :6])


@pytest.mark.parametrize("parts", [[1] * 9, [5, 1, 1, 1, 1], [9]], ids=str)
@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_part_by_part_gives_the_logits_of_the_whole(change: dict[str, Any], parts: list[int]) -> None:
    model, ids = randomized(changed(change)), tokens(3, 9)
    cache = Cache(model, 3, 9)
    found = torch.cat([cache(part) for part in ids.split(parts, dim=1)], dim=1)
    torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tail", [1, 4, 9])
@pytest.mark.parametrize("change", ALL.values(), ids=ALL)
def test_the_last_places_alone_are_those_of_the_whole(change: dict[str, Any], tail: int) -> None:
    model, ids = randomized(changed(change)), tokens(3, 9)
    targets = ids.roll(-1, 1)
    torch.testing.assert_close(model(ids, tail=tail), model(ids)[:, -tail:], rtol=1e-5, atol=1e-5)
    short = model.loss(ids, targets[:, -tail:], reduction="none")
    torch.testing.assert_close(short, model.loss(ids, targets, reduction="none")[:, -tail:], rtol=1e-5, atol=1e-5)


def test_before_looping_the_plain_list_of_layers_runs() -> None:
    loops = randomized(changed({"num_loops": 2, "loop_start": 1, "loop_end": 2}))
    plain, ids = GPT(SMALL), tokens(2, 9)
    held = loops.state_dict()
    plain.load_state_dict(held | {"skip_weights": held["skip_weights"][: SMALL.num_skips]})
    assert not torch.allclose(loops(ids), plain(ids))
    loops.looping = False
    torch.testing.assert_close(loops(ids), plain(ids))


def test_loops_are_cut_in_half_as_they_run() -> None:
    config = GPTConfig(num_layers=11, num_loops=2, loop_start=3, loop_end=5)
    assert config.layers(True) == ((0, 1, 2, 3, 4, 5, 3, 4), (5, 3, 4, 5, 6, 7, 8, 9, 10))
    assert config.layers(False) == (tuple(range(5)), tuple(range(5, 11)))
    assert config.num_skips == 8


RECORDS = {
    "#1855": (
        {
            "vocab_size": 8192,
            "num_layers": 11,
            "mlp_mult": 4,
            "activation": "leaky_relu2",
            "rope_dims": 16,
            "ln_scale": True,
            "xsa_last_n": 11,
            "attn_gate": "sparse",
            "smear": "gated",
            "skip_gates": True,
            "num_loops": 2,
            "loop_start": 3,
            "loop_end": 5,
            "parallel": "lanes",
            "parallel_start_layer": 8,
        },
        35_945_671,
    ),
    "ten layers": ({"num_layers": 10}, 18_897_488),
    "baseline": ({}, 17_059_912),
}


@pytest.mark.parametrize(("change", "count"), RECORDS.values(), ids=RECORDS)
def test_parameters_are_the_records_to_the_unit(change: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**change))
    assert sum(p.numel() for p in model.parameters()) == count


def test_an_attention_of_ones_own_is_used_by_its_name() -> None:
    calls = []

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        calls.append(q.shape)
        return softmax(q, k, v, mask)

    with pytest.raises(ConfigError, match="'counted' is unknown; choose"):
        GPT(changed({"attention": "counted"}))
    register("counted", counted)
    with pytest.raises(ConfigError, match="already"):
        register("counted", softmax)
    torch.manual_seed(0)
    own = GPT(changed({"attention": "counted"}))
    torch.manual_seed(0)
    ids = tokens(2, 9)
    torch.testing.assert_close(own(ids), GPT(SMALL)(ids))
    assert len(calls) == SMALL.num_layers
    torch.testing.assert_close(own(ids, tail=2), own(ids)[:, -2:])
    with pytest.raises(ConfigError, match="not known to go token by token"):
        Cache(own, 1, 4)


def test_orthogonal_matrices_start_orthogonal_and_zeros_stay() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=V, num_layers=2, model_dim=64, num_heads=4, orthogonal_init=True))
    for block in model.blocks:
        for weight in (block.attn.c_q.weight, block.mlp.fc.weight):
            torch.testing.assert_close(weight.T @ weight, torch.eye(64), rtol=1e-4, atol=1e-4)
        assert not block.attn.proj.weight.any()
        assert not block.mlp.proj.weight.any()


def test_overtones_are_the_embeddings_singular_values() -> None:
    torch.manual_seed(0)
    weight = GPT(changed({"overtone_init": True})).tok_emb.weight
    torch.manual_seed(0)
    largest = torch.linalg.matrix_norm(GPT(SMALL).tok_emb.weight, 2)
    values = torch.linalg.svdvals(weight)
    torch.testing.assert_close(values, largest / torch.arange(1, 33).sqrt(), rtol=1e-4, atol=1e-4)


def test_phases_blend_from_the_embedding_to_the_stream() -> None:
    mixes = [block.resid_mix.detach() for block in GPT(changed({"phased_init": True})).blocks]
    shares = [float(mix[0, 0]) for mix in mixes]
    assert shares == sorted(shares)
    assert shares[2] == pytest.approx(0.5)
    assert shares[0] == pytest.approx(1 / (1 + math.exp(1.5)))
    assert all(float(mix.sum(0).sub(1).abs().max()) < 1e-6 for mix in mixes)


def test_the_polynomial_is_close_to_tanh_where_it_matters_and_never_falls() -> None:
    model, ids = GPT(changed({"softcap": "poly"})), torch.linspace(-100, 100, 4001)
    capped = model._cap(ids)
    assert bool((capped.diff() >= 0).all())
    assert capped.abs().max() == 30
    near = ids.abs() < 15
    torch.testing.assert_close(capped[near], 30 * torch.tanh(ids[near] / 30), rtol=0.01, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loop_start": 3, "loop_end": 2}, "loop_end 2 comes before loop_start 3"),
        ({"loop_end": 9}, "loop_end is 9, but the model has layers 0 to 4"),
        ({"parallel_start_layer": 5}, "layers 0 to 4"),
        ({"num_loops": 1, "loop_end": 3, "parallel": "lanes", "parallel_start_layer": 3}, "begin anew in each loop"),
        ({"value_embed_layers": (7,)}, "value_embed_layers names layer 7"),
        ({"xsa_last_n": 6}, "xsa_last_n is 6"),
        ({"rope_dims": 5}, "rope_dims is 5"),
        ({"rope_dims": 10}, "up to the head's 8"),
        ({"rope_dims": 2, "rope_train_seq_len": 8}, "raise rope_dims"),
        ({"smear": "v1"}, "smear is 'v1'; choose none, fixed, gated"),
        ({"trigram": True}, "set bigram_vocab_size"),
        ({"attn_gate": "sparse", "gate_window": 33}, "gate_window 33 is wider"),
        ({"enable_looping_at": 1.0}, "share of the run"),
        ({"mlp_mult": 0.001}, "no hidden unit"),
        ({"leaky_slope": -1.0}, "leaky_slope is -1.0"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(change)


@pytest.mark.slow
def test_everything_on_is_exported_whole() -> None:
    model, ids = randomized(changed(EVERYTHING)).eval(), tokens(2, 12)
    program = torch.export.export(model, (ids,))
    torch.testing.assert_close(program.module()(ids), model(ids))


@pytest.mark.slow
def test_everything_on_is_one_graph_to_the_compiler() -> None:
    model, ids = randomized(changed(EVERYTHING)), tokens(2, 12)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    for model.looping in (False, True, False):
        torch.testing.assert_close(compiled(ids, ids), model.loss(ids, ids))


def test_what_is_at_work_says_so_and_nothing_else_does() -> None:
    assert evidence(GPT(SMALL)) == []
    for name, change in ALL.items():
        model, ids = GPT(changed(change)), tokens(4, 16)
        shapes_alone = {"longer than trained", "nothing"}
        assert (len(evidence(model)) > 0) == (name not in shapes_alone or "rope_dims" in change), name
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        before = evidence(model)
        for _ in range(6):
            optimizer.zero_grad()
            model.loss(ids, ids.roll(-1, 1)).backward()
            optimizer.step()
        learned = {"bigram", "trigram", "smear, fixed", "smear, gated", "value embeddings", "value residual", "lanes"}
        learned |= {"output gate", "dense gate", "sparse gate", "gated skips", "asymmetric softcap", "everything"}
        assert (evidence(model) != before) == (name in learned), name


def test_loops_come_on_when_it_is_time_and_that_is_told() -> None:
    model = GPT(changed({"num_loops": 1, "loop_start": 1, "loop_end": 2, "enable_looping_at": 0.35}))
    told: list[str] = []
    looping = Looping(model, told.append)
    seen = []
    for step in range(10):
        looping.before_step(step, step / 10, 1.0)
        seen.append(model.looping)
    assert seen == [False] * 4 + [True] * 6
    assert told == ["looping from step 5 on: layers 0,1,2,1,2,3,4"]
    assert GPT(model.config).looping  # what is loaded to be scored loops
