"""Made-up arguments follow the signature of the forward function and the configuration, whatever the class is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.hub import made_up
from birdie.hub.arguments import first_accepted
from birdie.hub.made_up import made_up_inputs
from tests.nightly import mostly_nightly

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
TEXT = {
    "vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 20,
}  # fmt: skip
IMAGE = {**TEXT, "image_size": 16, "patch_size": 8}
SOUND = {**TEXT, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
Build = Callable[[Any], Any]
MODELS: dict[str, tuple[Build, dict[str, tuple[int, ...]]]] = {  # arguments, with their shapes after the samples
    "text and images": (
        lambda t: t.CLIPModel(t.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8)),
        {"input_ids": (20,), "pixel_values": (3, 16, 16)},
    ),
    "positions that begin at an offset": (
        lambda t: t.XLMRobertaForMaskedLM(t.XLMRobertaConfig(**TEXT)),
        {"input_ids": (12,)},
    ),
    "boxes": (lambda t: t.LayoutLMModel(t.LayoutLMConfig(**TEXT)), {"input_ids": (20,), "bbox": (20, 4)}),
    "sound": (lambda t: t.HubertModel(t.HubertConfig(**SOUND)), {"input_values": (16_384,)}),
    "sound with channels": (
        lambda t: t.EncodecModel(
            t.EncodecConfig(num_filters=4, hidden_size=8, codebook_size=16, codebook_dim=8, num_lstm_layers=1)
        ),
        {"input_values": (1, 16_384)},
    ),
    "spectrograms": (
        lambda t: t.ASTModel(t.ASTConfig(**TEXT, max_length=32, num_mel_bins=16, patch_size=8)),
        {"input_values": (32, 16)},
    ),
    "videos": (
        lambda t: t.VideoMAEModel(t.VideoMAEConfig(**IMAGE, num_frames=4)),
        {"pixel_values": (4, 3, 16, 16)},
    ),
    "an encoder of images with a decoder of text": (
        lambda t: t.VisionEncoderDecoderModel(
            t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
                t.ViTConfig(**IMAGE),
                t.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=20, vocab_size=99, add_cross_attention=True),
            )
        ),
        {"pixel_values": (3, 16, 16), "decoder_input_ids": (20,)},
    ),
}
DAILY = ("text and images", "boxes", "spectrograms")


@pytest.mark.parametrize("kind", mostly_nightly(MODELS, DAILY))
def test_every_argument_that_the_signature_names_is_made_and_accepted(kind: str) -> None:
    build, shapes = MODELS[kind]
    model = build(transformers).eval()
    batches = made_up_inputs(model, torch.Generator().manual_seed(0))
    tensors = {name: value for name, value in batches[0].keywords.items() if isinstance(value, Tensor)}
    assert {name: tuple(value.shape[1:]) for name, value in tensors.items()} == shapes
    samples = {len(value) for value in tensors.values()}
    assert len(samples) == 1
    with torch.no_grad():
        model(**batches[-1].keywords)


class Configured(nn.Module):
    """Model of tokens of a given cost, with what the makers of arguments ask for."""

    main_input_name = "input_ids"

    def __init__(self, width: int, config: Any, error: Exception | None = None) -> None:
        super().__init__()
        self.table, self.config, self.error = nn.Embedding(99, width), config, error

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        x: Tensor = self.table(input_ids)
        return x @ x.mT


def configuration(**settings: Any) -> Any:
    return transformers.PreTrainedConfig(vocab_size=99, **settings)


@pytest.mark.parametrize("error", [RuntimeError("shapes"), AttributeError("no 'head'"), AssertionError()])
def test_a_forward_function_that_accepts_nothing_is_one_sentence(error: Exception) -> None:
    with pytest.raises(ConfigError, match="Configured cannot be made up"):
        first_accepted(Configured(8, configuration(), error), torch.Generator(), 1e9)


def test_an_argument_that_nobody_knows_is_named() -> None:
    class Strange(Configured):
        def forward(self, input_ids: Tensor, graph: Any) -> Tensor:  # type: ignore[override]
            return graph.edges + input_ids  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match="graph"):
        first_accepted(Strange(8, configuration()), torch.Generator(), 1e9)


def test_the_number_of_samples_follows_a_count_of_work_and_is_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Configured(64, configuration())

    def samples() -> list[Tensor]:
        return [batch.keywords["input_ids"] for batch in made_up_inputs(model, torch.Generator().manual_seed(0))]

    monkeypatch.setattr(made_up, "_WORK", 1 << 35)  # enough for all
    first, again = samples(), samples()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert len(torch.cat(first)) == 128  # the most tokens
    monkeypatch.setattr(made_up, "_WORK", 1 << 27)
    monkeypatch.setattr(made_up, "_WORK_OF_WEIGHT", 0)
    fewer = samples()
    assert 4 <= sum(map(len, fewer)) < 64
    assert fewer[0].shape[1] < first[0].shape[1]  # nothing names the length, so texts are shorter as well
