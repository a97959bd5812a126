"""Images: classifiers, segmentation, generative models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.training.result import Privacy
from tests.torch_scripts import script

N, BATCH, CLASSES = 48, 12, 4


def images(channels: int = 1, side: int = 12) -> TensorDataset:
    return TensorDataset(torch.rand(N, channels, side, side), torch.randint(CLASSES, (N,)))


class SampleConvNet(nn.Module):
    """The convolutional network of Opacus' MNIST example, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, 2, padding=2), nn.Conv2d(4, 8, 3, 1)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = x.view(-1, 8 * 2 * 2)
        return self.fc2(F.relu(self.fc1(x)))


def sgd(model: nn.Module, lr: float = 0.1) -> Any:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=lr, momentum=0.9)


def loop_of(model: nn.Module, loss: Any, data: Any, **settings: Any) -> qt.PrivateLoop:
    known: dict[str, Any] = {
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": BATCH, "epochs": 1, "optimizer": sgd(model)
    }  # fmt: skip
    return qt.PrivateLoop(model, loss, data, **(known | settings))


def verbs(model: nn.Module, data: Any, **settings: Any) -> Any:
    loader = settings.pop("data_loader", None) or DataLoader(data, batch_size=BATCH, shuffle=True)
    known: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "optimizer": sgd(model)}
    return qt.make_private(module=model, data_loader=loader, **(known | settings))


def all_steps(loop: qt.PrivateLoop) -> Privacy:
    for batch in loop:
        loop.step(batch)
    return loop.privacy


# --- MNIST in every form ------------------------------------------------------------------------------------------


@script()
def mnist_fit() -> Privacy:
    method = qg.DPSGD(steps=3, batch_size=BATCH, learning_rate=0.1)
    return qt.fit(SampleConvNet(), nn.CrossEntropyLoss(), images(), method, budget=qg.Budget(4.0, 1e-5)).privacy


@script()
def mnist_private_loop() -> Privacy:
    model = SampleConvNet()
    loop = loop_of(model, nn.CrossEntropyLoss(), images(), epochs=2)
    for epoch in loop.epochs():
        model.train()
        for batch in epoch:
            loop.step(batch)
    return loop.privacy


@script()
def mnist_opacus_with_criterion() -> Privacy:
    model, optimizer, loader, criterion = verbs(SampleConvNet(), images(), criterion=nn.CrossEntropyLoss())
    for _epoch in range(2):
        model.train()
        for data, target in loader:
            data, target = data.to("cpu"), target.to("cpu")
            optimizer.zero_grad()
            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
    return loader.privacy


@script(conditional=True)
def mnist_opacus_example() -> Privacy:
    """Opacus' mnist.py: losses are read, a plain criterion is called."""
    engine = qt.PrivacyEngine(secure_mode=False)
    model = SampleConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(images(), batch_size=BATCH, num_workers=0),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    losses = []
    for _batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert engine.accountant.get_epsilon(delta=1e-5) > 0
    return loader.privacy


@script(conditional=True)
def mnist_criterion_and_accuracy() -> Privacy:
    """The training accuracy is read, so what the loop does next may depend on it."""
    model, optimizer, loader, criterion = verbs(SampleConvNet(), images(), criterion=nn.CrossEntropyLoss())
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        criterion(output, target).backward()
        optimizer.step()
        (output.argmax(1) == target).float().mean().item()
    return loader.privacy


@script(conditional=True)
def flattened_in_the_loop() -> Privacy:
    model = nn.Sequential(nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    private, optimizer, loader = verbs(model, images())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x.view(x.shape[0], -1) / 0.5 - 1), y).backward()
        optimizer.step()
    return loader.privacy


# --- CIFAR -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, norm: Any) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, padding=1, bias=False), norm(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False), norm(outer)
        self.short = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += self.short(x)
        return F.relu(out)


def resnet(norm: Any = lambda channels: nn.GroupNorm(2, channels)) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Block(4, 4, norm), nn.MaxPool2d(2), Block(4, 8, norm),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


class Augmented(Dataset[Any]):
    """Random crops and flips, as torchvision's transforms draw them."""

    def __init__(self) -> None:
        self.images, self.labels = images(3, 12).tensors

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.pad(self.images[index], (2, 2, 2, 2))
        top, left = torch.randint(5, (2,)).tolist()
        image = image[:, top : top + 12, left : left + 12]
        return (image.flip(2) if torch.rand(()) < 0.5 else image), self.labels[index]


@script()
def cifar_resnet_gn_with_augmentation() -> Privacy:
    model = resnet()
    return all_steps(loop_of(model, nn.CrossEntropyLoss(), Augmented(), views=2))


@script(conditional=True)
def cifar_opacus_with_a_memory_manager() -> Privacy:
    model, optimizer, loader = verbs(resnet(), None, data_loader=DataLoader(Augmented(), batch_size=BATCH))
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as pieces:
        for x, y in pieces:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return loader.privacy


@script()
def frozen_backbone_with_a_new_head() -> Privacy:
    """A backbone with batch statistics is public and stays as it is."""
    backbone = resnet(nn.BatchNorm2d).eval().requires_grad_(False)
    model = nn.Sequential(backbone[:-1], nn.Linear(8, CLASSES))
    model.train()
    backbone.eval()
    loop = loop_of(model, nn.CrossEntropyLoss(), images(3), optimizer=sgd(model[1]))
    return all_steps(loop)


@script()
def unfrozen_in_a_second_stage() -> Privacy:
    model = resnet()
    model[:-1].requires_grad_(False)
    all_steps(loop_of(model, nn.CrossEntropyLoss(), images(3)))
    model.requires_grad_(True)
    return all_steps(loop_of(model, nn.CrossEntropyLoss(), images(3), optimizer=sgd(model, 0.01)))


@script()
def vision_transformer() -> Privacy:
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, 8, 4, 4)
            self.token, self.places = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 10, 8))
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Any:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
            return self.head(self.encoder(x)[:, 0])

    return all_steps(loop_of(ViT(), nn.CrossEntropyLoss(), images()))


@script()
def unet_segmentation() -> Privacy:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.mid = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.up, self.out = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor) -> Any:
            wide = F.relu(self.down(x))
            deep = F.relu(self.mid(F.max_pool2d(wide, 2)))
            return self.out(torch.cat([wide, self.up(deep)], 1))

    data = TensorDataset(torch.rand(N, 1, 12, 12), torch.randint(3, (N, 12, 12)))
    return all_steps(loop_of(UNet(), nn.CrossEntropyLoss(), data))
