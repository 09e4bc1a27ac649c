"""A trainer of a library changes what its dataset shares in memory, after each epoch.

Argument: {"trainer": ..., "kind": ...}. Prints one JSON line a batch: the epoch and its values.
"""

import json
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable

import numpy as np
import torch
import zoo
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")

EPOCHS = 3
# Persistent workers were forked before the first change: what they see is shared, or old.
OPTIONS = {"num_workers": 1, "persistent_workers": True}


class Shared(Dataset[torch.Tensor]):
    """Each value holds the level that the process which makes it sees."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tensor = torch.zeros(1).share_memory_() if kind == "tensor" else None
        self.value = multiprocessing.Value("d", 0.0) if kind == "value" else None
        self.array: object = None
        if kind == "array":
            held = multiprocessing.Array("d", 1, lock=False)
            self.array = np.frombuffer(held, dtype=np.float64)
        self.table: object = None
        if kind == "manager":
            global MANAGER
            MANAGER = multiprocessing.Manager()
            self.table = MANAGER.dict(level=0.0)
        self.queue = multiprocessing.Queue() if kind == "queue" else None
        self.seen = 0.0

    def __len__(self) -> int:
        return 16

    def set_level(self, level: float) -> None:
        if self.tensor is not None:
            self.tensor.fill_(level)
        elif self.value is not None:
            self.value.value = level
        elif self.array is not None:
            self.array[0] = level
        elif self.table is not None:
            self.table["level"] = level
        elif self.queue is not None:
            self.queue.put(level)

    def level(self) -> float:
        if self.tensor is not None:
            return float(self.tensor[0])
        if self.value is not None:
            return float(self.value.value)
        if self.array is not None:
            return float(self.array[0])
        if self.table is not None:
            return float(self.table["level"])
        assert self.queue is not None
        return self.seen

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.queue is not None and index == 0 and self.seen < EPOCHS:
            # The loop puts one for each epoch.
            self.seen = self.queue.get(timeout=150)
        return torch.tensor([index + 1000.0 * self.level()])


def took(batch: torch.Tensor) -> None:
    zoo.say(values=batch.flatten().tolist())


def with_lightning(dataset: Shared) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            took(batch)
            return self.layer(batch).square().mean()

        def on_train_epoch_end(self) -> None:
            dataset.set_level(self.current_epoch + 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-9)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=EPOCHS, accelerator="cpu", default_root_dir=folder, **quiet
        )
        trainer.fit(Model(), DataLoader(dataset, zoo.BATCH_SIZE, **OPTIONS))


def with_transformers(dataset: Shared) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
            took(values)
            return {"loss": self.layer(values).square().mean() * 1e-9}

    class Setting(TrainerCallback):
        def on_epoch_end(self, args: object, state: object, control: object, **_: object) -> None:
            dataset.set_level(round(state.epoch))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=zoo.BATCH_SIZE,
            dataloader_num_workers=OPTIONS["num_workers"],
            dataloader_persistent_workers=OPTIONS["persistent_workers"],
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
        )
        Trainer(
            model=Model(),
            args=arguments,
            train_dataset=dataset,
            data_collator=lambda samples: {"values": torch.stack(samples)},
            callbacks=[Setting()],
        ).train()


def with_accelerate(dataset: Shared) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(dataset, zoo.BATCH_SIZE, **OPTIONS))
    for epoch in range(EPOCHS):
        for batch in loader:
            took(batch)
        dataset.set_level(epoch + 1)


TRAINERS: dict[str, Callable[[Shared], None]] = {
    "lightning": with_lightning,
    "transformers": with_transformers,
    "accelerate": with_accelerate,
}


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.manual_seed(3)
    dataset = Shared(given["kind"])
    if given["kind"] == "queue":
        dataset.set_level(0.0)
    TRAINERS[given["trainer"]](dataset)


if __name__ == "__main__":
    main()
