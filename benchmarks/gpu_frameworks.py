"""The same training by Hugging Face's Trainer and by Lightning, as people write it."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset

from gpu_trainer import CLASSES, SEED, Clock, make_loader, network, picture_folder


class Named(Dataset):
    """Pictures as Hugging Face's models take them: by name."""

    def __init__(self, pictures: Dataset) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, object]:
        picture, label = self.pictures[index]
        return {"pixel_values": picture, "labels": label}


def train(options: argparse.Namespace) -> dict[str, object]:
    """Trains by the engine of the options, and returns what the script saw."""
    torch.manual_seed(SEED)
    clock = Clock(torch.device(options.device))
    if options.engine == "huggingface":
        train_by_huggingface(options, clock)
    else:
        train_by_lightning(options, clock)
    return clock.record()


def train_by_huggingface(options: argparse.Namespace, clock: Clock) -> None:
    """Trains a ViT by transformers' Trainer."""
    import transformers

    class EpochEnds(transformers.TrainerCallback):
        steps = 0

        def on_epoch_end(self, args, state, control, **others):  # type: ignore[no-untyped-def]
            clock.epoch_ends(state.global_step - self.steps)
            self.steps = state.global_step

    is_tiny = options.model == "tiny"
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = {**small, "intermediate_size": 64} if is_tiny else {}
    config = transformers.ViTConfig(
        image_size=options.side, patch_size=16, num_labels=CLASSES, **shape
    )
    pictures = picture_folder(options.data / "train", augment=options.augment, side=options.side)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            num_train_epochs=options.epochs,
            bf16=True,
            use_cpu=options.device == "cpu",
            dataloader_num_workers=options.workers,
            dataloader_pin_memory=options.pin,
            dataloader_persistent_workers=options.workers > 0,
            dataloader_drop_last=True,
            remove_unused_columns=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=SEED,
        )
        transformers.Trainer(
            model=transformers.ViTForImageClassification(config),
            args=arguments,
            train_dataset=Named(pictures),
            callbacks=[EpochEnds()],
        ).train()


def train_by_lightning(options: argparse.Namespace, clock: Clock) -> None:
    """Trains a network of torchvision by Lightning."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(options.model)

        def training_step(self, batch, number):  # type: ignore[no-untyped-def]
            pictures, labels = batch
            return torch.nn.functional.cross_entropy(self.model(pictures), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

        def on_train_epoch_end(self) -> None:
            clock.epoch_ends(self.trainer.num_training_batches)

    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        benchmark=True,
    )
    trainer.fit(Module(), make_loader(options))
