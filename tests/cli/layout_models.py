"""Small modules of the kinds whose checkpoints `test_real_layouts` compresses, with an example of their input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


class Detector(nn.Module):
    """Backbone with batch norm, and heads for classes and boxes; anchors are a buffer."""

    example = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, 2))
        self.bbox_head = nn.ModuleDict({"conv_cls": nn.Conv2d(24, 8, 1), "conv_reg": nn.Conv2d(24, 4, 1)})
        self.register_buffer("anchors", torch.rand(4, 1, 1) * 320)

    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone(images)
        boxes = self.bbox_head["conv_reg"](features) + self.anchors
        return torch.cat([self.bbox_head["conv_cls"](features), boxes], 1)


class SuperResolution(nn.Module):
    """Residual dense block and pixel shuffle."""

    example = torch.linspace(0, 1, 3 * 8 * 8).view(1, 3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.conv_first, self.conv_body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.conv_last = nn.Conv2d(16, 12, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv_first(images)
        features = features + 0.2 * self.conv_body(features).relu()
        return nn.functional.pixel_shuffle(self.conv_last(features), 2)


class Perceptron(nn.Sequential):
    """Two linear layers with a norm between them."""

    def __init__(self, inputs: int = 24, outputs: int = 10) -> None:
        super().__init__(nn.Linear(inputs, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, outputs))
        self.example = torch.linspace(-2, 2, 3 * inputs).view(3, inputs)


class LitClassifier(nn.Module):
    """Stands for a LightningModule: the network is its attribute `model`, and it has a buffer of its own."""

    example = Perceptron().example

    def __init__(self) -> None:
        super().__init__()
        self.model = Perceptron()
        self.register_buffer("class_weights", torch.rand(10))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs) * self.class_weights
        return logits


class Translator(nn.Module):
    """Encoder and decoder with one table of words, as fairseq's with shared embeddings."""

    example = torch.arange(12).view(2, 6)

    def __init__(self) -> None:
        super().__init__()
        encoder: Any = nn.Module()
        decoder: Any = nn.Module()
        encoder.embed_tokens = decoder.embed_tokens = nn.Embedding(40, 16, padding_idx=1)
        encoder.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        decoder.layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        encoder.register_buffer("version", torch.tensor([3.0]))
        self.encoder, self.decoder = encoder, decoder

    def forward(self, words: Tensor) -> Tensor:
        encoder: Any = self.encoder
        decoder: Any = self.decoder
        memory = encoder.layer(encoder.embed_tokens(words))
        logits: Tensor = decoder.layer(decoder.embed_tokens(words), memory) @ decoder.embed_tokens.weight.T
        return logits


class Generator(nn.Module):
    """Convolutions modulated by a style, with buffers of noise, as StyleGAN's."""

    example = torch.linspace(-1, 1, 2 * 16).view(2, 16)

    def __init__(self) -> None:
        super().__init__()
        self.style, self.input = nn.Linear(16, 16), nn.Parameter(torch.randn(1, 16, 4, 4))
        self.noises = nn.Module()
        self.noises.register_buffer("noise_0", torch.randn(1, 1, 4, 4))
        self.conv = nn.Conv2d(16, 3, 3)

    def forward(self, latent: Tensor) -> Tensor:
        images: Tensor = self.conv(self.input * self.style(latent)[:, :, None, None] + self.noises.noise_0)
        return images


class Discriminator(nn.Sequential):
    """Convolution and a linear layer."""

    example = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))


class Vocoder(nn.Module):
    """Convolutions with weight norm, as HiFi-GAN's generator."""

    example = torch.linspace(-3, 0, 8 * 20).view(1, 8, 20)

    def __init__(self) -> None:
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(8, 32, 7, padding=3))
        self.ups = nn.ModuleList([weight_norm(nn.ConvTranspose1d(32, 16, 4, 2, 1))])
        self.conv_post = weight_norm(nn.Conv1d(16, 1, 7, padding=3))

    def forward(self, mel: Tensor) -> Tensor:
        sound: Tensor = self.conv_post(self.ups[0](self.conv_pre(mel).relu())).tanh()
        return sound


class Policy(nn.Module):
    """Actor and critic of stable-baselines3, with the logarithms of standard deviations as a parameter."""

    example = torch.linspace(-1, 1, 4 * 12).view(4, 12)

    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.linspace(-1, 0, 6))
        self.mlp_extractor = nn.ModuleDict({"policy_net": Perceptron(12, 32), "value_net": Perceptron(12, 32)})
        self.action_net, self.value_net = nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, observations: Tensor) -> Tensor:
        actions = self.action_net(self.mlp_extractor["policy_net"](observations)) * self.log_std.exp()
        return torch.cat([actions, self.value_net(self.mlp_extractor["value_net"](observations))], 1)


class Normalizer(nn.Module):
    """Running mean and variance of observations, in doubles."""

    example = Policy.example
    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("mean", torch.randn(12)), ("var", torch.rand(12) + 0.1), ("count", torch.tensor(1e6))):
            self.register_buffer(name, value.double())

    def forward(self, observations: Tensor) -> Tensor:
        return (observations - self.mean) / (self.var + 1e-8).sqrt()


class Clip(nn.Module):
    """Towers for images and text, and a scale of the logits."""

    example = torch.arange(14).view(2, 7)

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 24, 4, 4), nn.Flatten(), nn.Linear(24 * 4, 24))
        self.token_embedding, self.positional_embedding = nn.Embedding(50, 24), nn.Parameter(torch.randn(7, 24) / 100)
        self.text_projection, self.logit_scale = nn.Parameter(torch.randn(24, 24) / 5), nn.Parameter(torch.tensor(2.7))

    def forward(self, words: Tensor) -> Tensor:
        texts = (self.token_embedding(words) + self.positional_embedding).mean(1) @ self.text_projection
        images = self.visual(torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8))
        logits: Tensor = self.logit_scale.exp() * (images @ texts.T)
        return logits


class Rwkv(nn.Module):
    """One block of time mixing, in bfloat16."""

    example = torch.arange(10).view(1, 10)

    def __init__(self) -> None:
        super().__init__()
        block, att = nn.Module(), nn.Module()
        att.time_decay, att.time_mix_k = nn.Parameter(torch.linspace(-6, 0, 32)), nn.Parameter(torch.rand(1, 1, 32))
        att.key, att.value, att.output = (nn.Linear(32, 32, bias=False) for _ in range(3))
        block.ln1, block.att = nn.LayerNorm(32), att
        self.emb, self.blocks, self.head = nn.Embedding(60, 32), nn.ModuleList([block]), nn.Linear(32, 60, bias=False)
        self.bfloat16()

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.emb(words)
        for part in self.blocks:
            block: Any = part
            att = block.att
            normed: Tensor = block.ln1(hidden)
            mixed = normed * att.time_mix_k + normed.roll(1, 1) * (1 - att.time_mix_k)
            state = torch.zeros_like(mixed[:, 0])
            for step in range(mixed.shape[1]):
                state = state * (-att.time_decay.exp()).exp() + att.key(mixed[:, step]) * att.value(mixed[:, step])
                hidden = hidden + 0 * hidden + att.output(state)[:, None] * (torch.arange(10) == step)[None, :, None]
        logits: Tensor = self.head(hidden)
        return logits


def seeded(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module as training has left it: statistics and norms are not those it began with."""
    torch.manual_seed(seed)
    module = kind()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for tensor in (*trained, *module.buffers()):
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.data += torch.rand(tensor.shape).to(tensor) / 10
    return module.eval()


def adam(module: nn.Module) -> dict[str, Any]:
    """State of an optimizer after a step."""
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def bert() -> Any:
    """The encoder of sentence-transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=64, max_position_embeddings=16))


def t5() -> Any:
    """Encoder and decoder with shared words, a tied head and relative positions."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 60}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def adapted() -> Any:
    """A perceptron with an adapter of peft."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the base is the same for all
        base = Perceptron()
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "3"], init_lora_weights=False))


def output(module: Any) -> Tensor:
    """Output for the example, or of a model of transformers for words."""
    words = torch.arange(12).view(2, 6)
    module.requires_grad_(False)  # torch multiplies in another order by weights that have gradients
    with torch.no_grad():
        if hasattr(module.eval(), "example"):
            outputs: Tensor = module(module.example)
        elif module.config.is_encoder_decoder:
            outputs = module(input_ids=words, decoder_input_ids=words)[0]
        else:
            outputs = module(input_ids=words)[0]
    return outputs
