"""Two ranks of a framework read samples of very different lengths: what each got is written.

FOLDER/rank-N.json has the steps of rank N as balanced_script.py writes them: epoch, indices,
elements. The frameworks make their own samplers.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from balanced_script import BATCH_SIZE, NUM_SAMPLES, SEED, lengths_of
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 3
LENGTHS = lengths_of(NUM_SAMPLES)

Sample = tuple[int, torch.Tensor]
Batch = dict[str, torch.Tensor]

_steps: list[list[object]] = []


class Rows(Dataset[Sample]):
    held: object = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return index, torch.ones(LENGTHS[index])


def padded(samples: list[Sample]) -> Batch:
    rows = torch.nn.utils.rnn.pad_sequence([row for _, row in samples], batch_first=True)
    return {"indices": torch.tensor([index for index, _ in samples]), "rows": rows}


def took(epoch: int, batch: Batch) -> None:
    indices = batch["indices"].tolist()
    _steps.append([epoch, indices, sum(LENGTHS[index] for index in indices)])


def loader_of(**options: Any) -> "DataLoader[Sample]":
    return DataLoader(Rows(), BATCH_SIZE, num_workers=1, collate_fn=padded, **options)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, indices: torch.Tensor, rows: torch.Tensor) -> Batch:
        return {"loss": self.layer(rows.sum(1, keepdim=True)).square().mean()}


def with_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader_of(shuffle=True))
    for epoch in range(EPOCHS):
        for batch in loader:
            took(epoch, batch)
            with accelerator.accumulate(network):
                accelerator.backward(network(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()


def with_lightning() -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Batch, _: int) -> torch.Tensor:
            took(self.current_epoch, batch)
            return self.network(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), loader_of(shuffle=True))


class Tokens(Rows):
    """With the lengths that transformers groups by."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [1] * LENGTHS[index], "index": index}


def padded_tokens(samples: list[dict[str, Any]]) -> Batch:
    return padded([(one["index"], torch.ones(len(one["input_ids"]))) for one in samples])


def with_transformers_by_length() -> None:
    with_transformers(Tokens(), padded_tokens, train_sampling_strategy="group_by_length")


def with_transformers(data: Any = None, collate: Any = padded, **options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class Watching(Trainer):
        def training_step(self, model: object, inputs: Batch, *args: object) -> torch.Tensor:
            took(int(self.state.epoch or 0), inputs)
            return super().training_step(model, inputs, *args)

    arguments = TrainingArguments(
        output_dir=os.environ["STOKER_TEST_DIR"],
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=2,
        dataloader_num_workers=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
        **options,
    )
    Watching(Network(), arguments, train_dataset=data or Rows(), data_collator=collate).train()


def with_a_loader_made_in_each_epoch() -> None:
    torch.distributed.init_process_group("gloo")
    data = Rows()
    for epoch in range(EPOCHS):
        sampler: DistributedSampler[Sample] = DistributedSampler(data, seed=SEED)
        sampler.set_epoch(epoch)
        loader = DataLoader(data, BATCH_SIZE, sampler=sampler, num_workers=1, collate_fn=padded)
        for batch in loader:
            took(epoch, batch)


def with_a_seed_of_each_rank() -> None:
    torch.distributed.init_process_group("gloo")
    sampler: DistributedSampler[Sample] = DistributedSampler(Rows(), seed=int(os.environ["RANK"]))
    loader = loader_of(sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            took(epoch, batch)


def with_a_rank_that_makes_its_batches_itself() -> None:
    torch.distributed.init_process_group("gloo")
    data = Rows()
    if os.environ["RANK"] == "0":
        # Of what only one rank opens, such as a writer of its log: it cannot be sent.
        data.held = (number for number in range(3))
    sampler: DistributedSampler[Sample] = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, num_workers=1, collate_fn=padded)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            took(epoch, batch)


WAYS: dict[str, Callable[[], None]] = {
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "transformers": with_transformers,
    "transformers by length": with_transformers_by_length,
    "made in each epoch": with_a_loader_made_in_each_epoch,
    "a seed of each rank": with_a_seed_of_each_rank,
    "one rank makes its own": with_a_rank_that_makes_its_batches_itself,
}


def main() -> None:
    _, way, folder = sys.argv
    torch.manual_seed(7)
    WAYS[way]()
    name = f"rank-{os.environ['RANK']}.json"
    (Path(folder) / name).write_text(json.dumps(_steps))


if __name__ == "__main__":
    main()
