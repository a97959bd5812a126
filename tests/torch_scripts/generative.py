"""Generative, siamese and adversarial models of images."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from quietgrad.training.result import Privacy
from tests.torch_scripts import script
from tests.torch_scripts.vision import N, SampleConvNet, all_steps, images, loop_of, verbs


def generator() -> nn.Sequential:
    return nn.Sequential(nn.ConvTranspose2d(6, 4, 3), nn.ReLU(True), nn.ConvTranspose2d(4, 1, 4, 4), nn.Tanh())


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 6), nn.Flatten(0)
    )


@script(conditional=True)
def dcgan_opacus_example() -> Privacy:
    """Opacus' dcgan.py: the discriminator is private, the generator learns from what it says."""
    fake_maker, critic = generator(), discriminator()
    by_fake = torch.optim.Adam(fake_maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    critic, by_critic, loader = verbs(critic, images(), optimizer=torch.optim.Adam(critic.parameters(), lr=2e-4))
    criterion = nn.BCEWithLogitsLoss()
    for real, _ in loader:
        by_critic.zero_grad(set_to_none=True)
        size = real.size(0)
        if size == 0:
            continue
        output = critic(real)
        error_real = criterion(output, torch.full((size,), 0.9))
        fake = fake_maker(torch.randn(size, 6, 1, 1))
        error_fake = criterion(critic(fake.detach()), torch.full((size,), 0.1))
        (error_real + error_fake).backward()
        by_critic.step()
        by_critic.zero_grad(set_to_none=True)
        fake_maker.zero_grad()
        error = criterion(critic(fake), torch.full((size,), 0.9))
        error.backward()
        assert fake_maker[0].weight.grad is not None
        by_fake.step()
    return loader.privacy


@script()
def gan_whose_critic_draws_its_fakes() -> Privacy:
    fake_maker, critic = generator(), discriminator()
    by_fake = torch.optim.Adam(fake_maker.parameters(), lr=2e-4)

    def loss(model: nn.Module, real: Tensor, _label: Tensor) -> Tensor:
        fake = fake_maker(torch.randn(1, 6, 1, 1)).detach()
        real_score, fake_score = model(real), model(fake)
        return F.softplus(-real_score).mean() + F.softplus(fake_score).mean()

    loop = loop_of(critic, loss, images())
    for batch in loop:
        loop.step(batch)
        by_fake.zero_grad()
        F.softplus(-critic(fake_maker(torch.randn(8, 6, 1, 1)))).mean().backward()
        by_fake.step()
        critic.zero_grad()
    return loop.privacy


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(144, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 144), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.encode(x.view(-1, 144)))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(z), mean, spread


@script()
def vae_pytorch_example() -> Privacy:
    def elbo(model: nn.Module, x: Tensor, _label: Tensor) -> Tensor:
        made, mean, spread = model(x)
        entropy = F.binary_cross_entropy(made, x.view(-1, 144), reduction="sum")
        return entropy - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())

    return all_steps(loop_of(VAE(), elbo, images()))


@script()
def autoencoder_without_labels() -> Privacy:
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 144))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x.flatten(1))

    return all_steps(loop_of(model, loss, TensorDataset(torch.rand(N, 1, 12, 12))))


@script()
def diffusion() -> Privacy:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.net = nn.Embedding(10, 8), nn.Conv2d(1, 8, 3, padding=1)
            self.out = nn.Conv2d(8, 1, 3, padding=1)

        def forward(self, x: Tensor, t: Tensor) -> Any:
            return self.out(F.silu(self.net(x) + self.time(t)[:, :, None, None]))

    kept = torch.linspace(0.99, 0.1, 10)

    def loss(model: nn.Module, x: Tensor, _label: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],))
        noise, share = torch.randn_like(x), kept[t].view(-1, 1, 1, 1)
        return F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)

    return all_steps(loop_of(Denoiser(), loss, images()))


@script()
def siamese_pairs() -> Privacy:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, 8))

    def loss(model: nn.Module, one: Tensor, other: Tensor, same: Tensor) -> Tensor:
        distance = F.pairwise_distance(model(one), model(other))
        return (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()

    data = TensorDataset(torch.rand(N, 1, 12, 12), torch.rand(N, 1, 12, 12), torch.randint(2, (N,)).float())
    return all_steps(loop_of(encoder, loss, data))


@script()
def simclr_on_two_views_of_one_record() -> Privacy:
    """BYOL's form: a record's two views are pulled together; no other record is needed."""
    online = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 8))
    target = copy.deepcopy(online).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, _label: Tensor) -> Tensor:
        one, other = x + 0.1 * torch.randn_like(x), x.flip(3)
        return 2 - 2 * F.cosine_similarity(model(one), target(other)).mean()

    loop = loop_of(online, loss, images())
    for batch in loop:
        loop.step(batch)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    return loop.privacy


@script(conditional=True)
def fgsm_adversarial_training() -> Privacy:
    model, optimizer, loader = verbs(SampleConvNet(), images())
    for x, y in loader:
        x = x.clone().requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        attacked = (x + 0.1 * x.grad.sign()).clamp(0, 1).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(attacked), y).backward()
        optimizer.step()
    return loader.privacy


@script()
def fgsm_inside_the_loss() -> Privacy:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: F.cross_entropy(model(x), y))(x)
        return F.cross_entropy(model((x + 0.1 * slope.sign()).clamp(0, 1).detach()), y)

    return all_steps(loop_of(SampleConvNet(), loss, images()))
