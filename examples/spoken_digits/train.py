"""Trains a small network on spoken digits with PyTorch Lightning: audio of variable length.

A plain Lightning script. It runs by itself (`python examples/spoken_digits/train.py`), under
torchrun, on SageMaker, and under stoker; the import of DataLoader is all that it knows of stoker.
"""

import argparse
import io
import json
import os
import tarfile
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from stoker import DataLoader

try:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
except ModuleNotFoundError:
    raise SystemExit(
        "this example needs Lightning: pip install -r examples/spoken_digits/requirements.txt"
    ) from None

RATE = 8000
TARGET_RATE = 16000
FFT = 512
HOP = 160
BANDS = 64
BUNDLED = Path(__file__).resolve().parent / "data" / "recordings.tar.bz2"

Clip = tuple[torch.Tensor, int]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SpokenDigits(Dataset):
    """Holds log-mel spectrograms of shape (frames, 64), as long as the recording, and their digits.

    Args:
        recordings: Samples at 8 kHz, -1 to 1, and the digit that they say.
        copies: How often each recording comes in an epoch, each time augmented again.
        is_augmented: False: the recording as it is.
    """

    def __init__(
        self, recordings: Sequence[tuple[np.ndarray, int]], *, copies: int, is_augmented: bool
    ) -> None:
        self.recordings = recordings
        self.copies = copies
        self.is_augmented = is_augmented
        self.filters = mel_filters()

    def __len__(self) -> int:
        return len(self.recordings) * self.copies

    def __getitem__(self, index: int) -> Clip:
        samples, digit = self.recordings[index % len(self.recordings)]
        if self.is_augmented:
            samples = resample(samples, TARGET_RATE / RATE * np.random.uniform(0.85, 1.15))
            samples = add_room(samples)
            samples = add_noise(samples, decibels=np.random.uniform(5, 30))
        else:
            samples = resample(samples, TARGET_RATE / RATE)
        image = spectrogram(samples, self.filters)
        return (mask(image) if self.is_augmented else image), digit


def resample(samples: np.ndarray, ratio: float) -> np.ndarray:
    """Makes the recording `ratio` times as long: faster or slower at a fixed rate."""
    spectrum = np.fft.rfft(samples)
    length = max(FFT, round(len(samples) * ratio))
    kept = np.zeros(length // 2 + 1, complex)
    width = min(len(kept), len(spectrum))
    kept[:width] = spectrum[:width]
    return np.fft.irfft(kept, length) * (length / len(samples))


def add_room(samples: np.ndarray) -> np.ndarray:
    """Puts the recording into a room of random size: echoes fade in 0.05 to 0.3 seconds."""
    length = int(TARGET_RATE * np.random.uniform(0.05, 0.3))
    echoes = np.random.standard_normal(length) * np.exp(-6 * np.arange(length) / length)
    echoes *= np.random.uniform(0, 0.3) / np.linalg.norm(echoes)
    echoes[0] = 1.0
    size = len(samples) + length - 1
    wet = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(echoes, size), size)
    return wet[: len(samples)]


def add_noise(samples: np.ndarray, *, decibels: float) -> np.ndarray:
    """Adds noise that is `decibels` below the recording and loses high tones."""
    noise = np.fft.rfft(np.random.standard_normal(len(samples)))
    noise /= np.maximum(1, np.arange(len(noise))) ** np.random.uniform(0, 0.5)
    coloured = np.fft.irfft(noise, len(samples))
    loudness = np.std(samples) / (np.std(coloured) + 1e-9)
    return samples + coloured * loudness * 10 ** (-decibels / 20)


def spectrogram(samples: np.ndarray, filters: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of the energy in 64 bands, every 10 ms, of mean 0 and deviation 1."""
    wave_form = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    window = torch.hann_window(FFT)
    power = torch.stft(wave_form, FFT, HOP, window=window, return_complex=True).abs() ** 2
    image = torch.log(filters @ power + 1e-6).T
    return ((image - image.mean()) / (image.std() + 1e-5)).contiguous()


def mask(image: torch.Tensor) -> torch.Tensor:
    """Blanks two random stripes of time and two of frequency."""
    image = image.clone()
    for _ in range(2):
        for axis, most in ((0, max(2, len(image) // 6)), (1, 10)):
            width = np.random.randint(0, most)
            start = np.random.randint(0, image.shape[axis] - width)
            image.narrow(axis, start, width).zero_()
    return image


def mel_filters() -> torch.Tensor:
    """Returns triangles over the bins of an FFT, of shape (64, 257), even on the mel scale."""
    mels = np.linspace(0, 2595 * np.log10(1 + TARGET_RATE / 2 / 700), BANDS + 2)
    bins = (700 * (10 ** (mels / 2595) - 1)) / (TARGET_RATE / 2) * (FFT // 2)
    grid = np.arange(FFT // 2 + 1)[None]
    low, middle, high = bins[:-2, None], bins[1:-1, None], bins[2:, None]
    rising, falling = (grid - low) / (middle - low), (high - grid) / (high - middle)
    return torch.from_numpy(np.clip(np.minimum(rising, falling), 0, 1)).float()


def pad(clips: Sequence[Clip]) -> Batch:
    """Returns the spectrograms padded to the longest, their lengths, and their digits."""
    images, digits = zip(*clips, strict=True)
    lengths = torch.tensor([len(image) for image in images])
    padded = nn.utils.rnn.pad_sequence(list(images), batch_first=True)
    return padded, lengths, torch.tensor(digits)


def read_recordings(path: Path) -> tuple[list[tuple[np.ndarray, int]], ...]:
    """Reads recordings to train and to test on, from a folder of wav files or a tar archive of one.

    The dataset's own split: index 0 to 4 of each digit and speaker is for the test.
    """
    if path.is_dir():
        contents = {file.name: file.read_bytes() for file in path.rglob("*.wav")}
    else:
        with tarfile.open(path) as archive:
            members = (member for member in archive if member.name.endswith(".wav"))
            contents = {Path(each.name).name: archive.extractfile(each).read() for each in members}
    if not contents:
        raise SystemExit(f"no wav files in {path}: name the folder recordings/ of the dataset")
    train, test = [], []
    for name in sorted(contents):
        digit, _, index = Path(name).stem.split("_")
        with wave.open(io.BytesIO(contents[name])) as file:
            raw = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        samples = (raw / 32768).astype(np.float32)
        (test if int(index) < 5 else train).append((samples, int(digit)))
    return train, test


class Recordings(lightning.LightningDataModule):
    """Makes the loaders, whose workers may be anywhere."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        train, test = read_recordings(options.data)
        self.train_set = SpokenDigits(train, copies=options.copies, is_augmented=True)
        self.test_set = SpokenDigits(test, copies=1, is_augmented=False)
        self.options = options

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.test_set, shuffle=False)

    def loader(self, dataset: SpokenDigits, *, shuffle: bool) -> DataLoader:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return DataLoader(
            dataset,
            batch_size=self.options.batch_size // world_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.options.workers,
            collate_fn=pad,
            pin_memory=torch.cuda.is_available(),
        )


class Listener(lightning.LightningModule):
    """Stacks three convolutions over time, the mean over a recording's frames, a linear layer."""

    def __init__(self, *, learning_rate: float, width: int = 96) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.convolutions = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, padding=2),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        heard = self.convolutions(images.transpose(1, 2))
        frames = torch.arange(heard.shape[2], device=heard.device)
        inside = (frames[None] < lengths[:, None])[:, None]
        mean = (heard * inside).sum(2) / lengths[:, None]
        peak = heard.masked_fill(~inside, 0).amax(2)
        return self.head(torch.cat([mean, peak], 1))

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        images, lengths, digits = batch
        loss = nn.functional.cross_entropy(self(images, lengths), digits)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        images, lengths, digits = batch
        right = (self(images, lengths).argmax(1) == digits).float().mean()
        self.log("accuracy", right, batch_size=len(digits), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, int(self.trainer.estimated_stepping_batches)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class OneLine(lightning.Callback):
    """Prints a line per epoch, as logs of jobs want it."""

    def on_validation_end(self, trainer: lightning.Trainer, module: Listener) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            print(
                f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
                f"  loss {found.get('loss', float('nan')):.4f}  accuracy {found['accuracy']:.4f}",
                flush=True,
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; SageMaker's variables give the defaults where they are set."""
    parser = argparse.ArgumentParser(description="Trains on spoken digits.")
    data = Path(os.environ.get("SM_CHANNEL_TRAINING", BUNDLED))
    parser.add_argument("--data", type=Path, default=data, help="recordings/, or an archive of it")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--copies", type=int, default=4, help="of a recording, an epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="recordings a step, all ranks")
    parser.add_argument("--workers", type=int, default=2, help="loader workers of a rank")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from and to save to")
    parser.add_argument("--save-every", type=int, help="steps; default: at the end of an epoch")
    metrics = os.environ.get("STOKER_METRICS")
    parser.add_argument("--metrics", default=metrics, help="write the accuracy to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, prints a line per epoch, and returns the accuracy on recordings it has not heard."""
    options = parse(arguments)
    lightning.seed_everything(options.seed, verbose=False)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    callbacks: list[lightning.Callback] = [OneLine()]
    if options.checkpoints:
        callbacks.append(
            ModelCheckpoint(
                options.checkpoints,
                save_last=True,
                every_n_train_steps=options.save_every,
            )
        )
    trainer = lightning.Trainer(
        strategy="ddp" if world_size > 1 else "auto",
        accelerator="auto",
        devices=local_world_size,
        num_nodes=world_size // local_world_size,
        max_epochs=options.epochs,
        callbacks=callbacks,
        enable_checkpointing=options.checkpoints is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = Listener(learning_rate=options.learning_rate)
    # Lightning takes up the last checkpoint by itself, where there is one.
    trainer.fit(model, Recordings(options), ckpt_path="last" if options.checkpoints else None)
    accuracy = float(trainer.callback_metrics["accuracy"])
    if trainer.is_global_zero and options.metrics:
        Path(options.metrics).write_text(json.dumps({"accuracy": accuracy}))
    return accuracy


if __name__ == "__main__":
    main()
