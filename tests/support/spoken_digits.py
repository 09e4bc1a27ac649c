"""Classifies spoken digits: wave files in a folder for each digit. Nothing here knows of stoker."""

import argparse
import os
import wave
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class SpokenDigits(Dataset):
    def __init__(self, root, *, augment=False):
        self.classes = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
        self.ops = ["gain"] if augment else []
        self.files = [
            (file, label)
            for label, name in enumerate(self.classes)
            for file in sorted(Path(root, name).glob("*.wav"))
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file, label = self.files[index]
        with wave.open(str(file)) as sound:
            samples = torch.frombuffer(bytearray(sound.readframes(10**6)), dtype=torch.int16)
        signal = samples.float() / 32768
        if "gain" in self.ops:
            signal = signal * (0.8 + 0.4 * torch.rand(1))
        window = torch.hann_window(256)
        spectrum = torch.stft(signal, 256, 128, window=window, return_complex=True).abs()
        return torch.log1p(spectrum).mean(1), label


def options():
    parser = argparse.ArgumentParser()
    channel = os.environ.get("SM_CHANNEL_TRAINING", "sounds")
    parser.add_argument("--data", type=Path, default=channel)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="step size of Adam")
    parser.add_argument("--hidden", type=int, default=32, choices=[16, 32, 64])
    parser.add_argument("--augment", action="store_true", help="louder and quieter copies")
    parser.add_argument("--workers", type=int, default=1)
    return parser.parse_args()


def main():
    told = options()
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    sounds = SpokenDigits(told.data, augment=told.augment)
    loader = DataLoader(sounds, told.batch_size, shuffle=True, num_workers=told.workers)
    hidden, digits = torch.nn.Linear(129, told.hidden), len(sounds.classes)
    model = torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(told.hidden, digits))
    optimizer = torch.optim.Adam(model.parameters(), told.learning_rate)
    for epoch in range(told.epochs):
        right = 0
        for signals, labels in loader:
            scores = model(signals)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((scores.argmax(1) == labels).sum())
        accuracy = right / len(sounds)
        print(f"epoch {epoch} loss {loss.item():.3f} accuracy {accuracy:.2f}", flush=True)
    folder = Path(os.environ.get("SM_MODEL_DIR", "model"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")


if __name__ == "__main__":
    main()
