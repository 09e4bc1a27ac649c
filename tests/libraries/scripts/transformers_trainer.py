"""Trains a small model without a download by transformers' Trainer; evaluates after each epoch."""

import tempfile
from collections.abc import Mapping

import torch
import zoo
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(8).mul(index + self.first).remainder(50)
        return {"input_ids": words, "labels": torch.tensor(index % 2)}


class Watched(BertForSequenceClassification):
    def forward(self, **given: object) -> object:
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        zoo.took(tensors, training=self.training)
        return super().forward(**given)


def main() -> None:
    layers = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=16, max_position_embeddings=8, **layers)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=zoo.BATCH_SIZE,
            per_device_eval_batch_size=zoo.BATCH_SIZE,
            dataloader_num_workers=2,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
        )
        data = {"train_dataset": Sentences(zoo.SAMPLES, 1), "eval_dataset": Sentences(16, 3)}
        done = Trainer(model=Watched(config), args=arguments, **data).train()
    assert isinstance(done.metrics, Mapping)


if __name__ == "__main__":
    main()
