"""A small pipeline with the shape of those of Diffusers, for the tests beside."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

STEPS = 4


@dataclass
class Sample:
    sample: torch.Tensor


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(self, ids):
        return self.out(self.tokens(ids))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.time, self.text = nn.Linear(1, 16), nn.Linear(8, 16)

    def forward(self, sample, timestep, encoder_hidden_states=None):
        condition = self.time(timestep.float().reshape(1, 1))
        condition = condition + self.text(encoder_hidden_states.mean(1))
        hidden = torch.tanh(self.conv_in(sample) + condition[:, :, None, None])
        return Sample(self.conv_out(hidden))


class VAE(nn.Module):
    """Called by its method `decode` only, as in Diffusers."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 1))

    def decode(self, latents):
        return Sample(self.decoder(latents))


class Pipeline:
    """Text to image; its attributes are set through a setter, as in Diffusers."""

    def __init__(self):
        torch.manual_seed(0)
        self.config = SimpleNamespace(unet=("library", "UNet"))
        self.text_encoder = TextEncoder().eval()
        self.unet = UNet().eval()
        self.vae = VAE().eval()
        self.size = 16
        self.runs = 0

    def __setattr__(self, name, value):
        if name == "unet" and "unet" in vars(self):
            raise AssertionError("the setter would rewrite the configuration")
        super().__setattr__(name, value)

    @torch.no_grad()
    def __call__(self, prompt, output_type="pt"):
        self.runs += 1
        ids = torch.tensor([[ord(letter) % 32 for letter in prompt]])
        text = self.text_encoder(ids)
        latents = torch.randn(1, 4, self.size, self.size)
        for step in torch.arange(STEPS, 0, -1):
            latents = latents - 0.1 * self.unet(latents, step, encoder_hidden_states=text).sample
        image = self.vae.decode(latents).sample.clamp(-1, 1) / 2 + 0.5
        if output_type == "np":
            return SimpleNamespace(images=(image * 255).round().to(torch.uint8).numpy())
        return SimpleNamespace(images=image)
