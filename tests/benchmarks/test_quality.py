"""Quality: a model has no KL to itself, every tensor counts, and bits per byte are those of the scorer."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import quality
from benchmarks.quality import Subject
from birdie.data.byte_accounting import ByteTable
from birdie.data.tokenizer import load_tokenizer
from birdie.model.gpt import GPT, GPTConfig
from birdie.score.accumulator import Text
from birdie.score.evaluator import score
from tests.benchmarks.small_gpt import subject


def test_a_model_has_no_kl_to_itself_and_every_tensor_counts() -> None:
    model = subject()
    same = model.measure(model.state)
    assert (same.kl, same.agreement) == (0, 1)
    assert same.bpb == len(model.held_out)
    changed: Mapping[str, Tensor] = {**model.state, "skip_weights": model.state["skip_weights"] + 1}
    assert model.measure(changed).kl > 0
    assert model.on(torch.device("cpu")).measure(changed) == model.measure(changed)
    moved = model.on(torch.device("meta"))
    parts = (*moved.held_out[0], *moved.calibration[0], *moved.state.values(), *moved.build().parameters())
    assert all(tensor.is_meta for tensor in parts)
    assert not any(tensor.is_meta for tensor in model.module.parameters())
    with pytest.raises(RuntimeError, match="skip_weights"):
        model.measure({name: weight for name, weight in model.state.items() if name != "skip_weights"})


@pytest.mark.parametrize("count", [3, 32])  # windows: less than a batch of this module, more than one of the scorer
def test_bits_per_byte_equal_those_of_the_scorer(count: int) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer("bytes")
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1))
    tokens = np.random.default_rng(0).integers(4, 200, count * quality.SEQ_LEN + 1).astype(np.uint16)
    table: ByteTable = tokenizer.byte_table()
    batches = quality.windows(tokens)
    one_layer = Subject(
        "one", model.eval(), model.state_dict(), batches, [], "", lambda: GPT(model.config),
        lambda nats: quality._bits(nats, tokens, table, tokenizer.bos_id),
    )  # fmt: skip
    device = torch.device("cpu")
    text = Text(tokens, table, tokenizer.bos_id)
    expected = score(model, text, train_seq_len=quality.SEQ_LEN, batch_tokens=8192, device=device).score
    assert one_layer.measure(model.state_dict()).bpb == pytest.approx(expected.bpb, rel=1e-6)


def test_a_digest_depends_on_names_values_dtypes_and_data() -> None:
    state, tokens = {"a": torch.ones(3)}, np.arange(5)
    digests = {
        quality.digest(state, tokens),
        quality.digest({"b": torch.ones(3)}, tokens),
        quality.digest({"a": torch.ones(3, dtype=torch.float16)}, tokens),
        quality.digest(state, tokens[:4]),
    }
    assert len(digests) == 4
    assert quality.digest(dict(state), tokens.copy()) == quality.digest(state, tokens)
