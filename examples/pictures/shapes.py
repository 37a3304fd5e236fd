"""A small network that was trained on pictures, for docs/pictures.md.

    python shapes.py

draws ``pictures/train`` and ``pictures/val``, a folder for each class, and trains :class:`Shapes` on them (10 s on two
cores), which is kept in ``shapes.pt``. ``network`` gives it back, for ``trtopt export shapes.py:network``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

CLASSES = ("circle", "square", "triangle")
SIDE = 64
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
HERE = Path(__file__).parent


class Block(nn.Module):
    """A residual block, as torchvision's ResNets have it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, 2, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


class Shapes(nn.Module):
    """``picture`` [batch, 3, 64, 64], normalized as for ImageNet -> ``scores`` [batch, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(Block(16, 32), Block(32, 64), Block(64, 64))
        self.head = nn.Linear(64, len(CLASSES))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(picture)).mean((2, 3)))


def draw(rng: np.random.Generator, label: int) -> Image.Image:
    """A bright shape of any size, place and colour on a dark noisy ground."""
    ground, color = rng.integers(0, 90, 3), rng.integers(140, 256, 3)
    noise = rng.normal(ground, 20, (SIDE, SIDE, 3))
    image = Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8))
    radius = int(rng.integers(12, 26))
    x, y = (int(value) for value in rng.integers(radius, SIDE - radius, 2))
    box, fill = (x - radius, y - radius, x + radius, y + radius), tuple(int(value) for value in color)
    pen = ImageDraw.Draw(image)
    if label == 0:
        pen.ellipse(box, fill)
    elif label == 1:
        pen.rectangle(box, fill)
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill)
    return image


def save_pictures(folder: Path) -> None:
    """``train`` with 200 pictures of each class, ``val`` with 40."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 200), ("val", 40)):
        for label, name in enumerate(CLASSES):
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                draw(rng, label).save(place / f"{index:03d}.jpg", quality=90)


def load_pictures(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The pictures of the folders of all classes, prepared, and their labels."""
    files = [(path, label) for label, name in enumerate(CLASSES) for path in sorted((folder / name).glob("*.jpg"))]
    pixels = torch.from_numpy(np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files]))
    prepared = (pixels.float() / 255 - MEAN) / STD
    return prepared.permute(0, 3, 1, 2).contiguous(), torch.tensor([label for _, label in files])


def train(folder: Path) -> Shapes:
    """A network that knows the pictures of ``folder``."""
    torch.manual_seed(0)
    network, (pictures, labels) = Shapes(), load_pictures(folder)
    optimizer = torch.optim.AdamW(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=15 * 10)
    for _ in range(15):
        for part in torch.randperm(len(pictures)).split(64):
            chosen = pictures[part].flip(3) if torch.rand(()) < 0.5 else pictures[part]
            loss = nn.functional.cross_entropy(network(chosen), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.eval()


def network() -> Shapes:
    """The trained network."""
    found = Shapes()
    found.load_state_dict(torch.load(HERE / "shapes.pt", weights_only=True))
    return found.eval()


if __name__ == "__main__":
    save_pictures(HERE / "pictures")
    trained = train(HERE / "pictures/train")
    torch.save(trained.state_dict(), HERE / "shapes.pt")
    pictures, labels = load_pictures(HERE / "pictures/val")
    with torch.no_grad():
        right = (trained(pictures).argmax(1) == labels).float().mean()
    print(f"{right:.1%} of the pictures to verify on are known")
