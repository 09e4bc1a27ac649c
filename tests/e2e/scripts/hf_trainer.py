"""transformers' Trainer on a small model that needs no download."""

import sys
import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Sentences(Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, index):
        time.sleep(0.003)
        return {"input_ids": torch.randint(50, (8,)), "labels": torch.tensor(index % 2)}


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            print(f"loss {float(logs['loss']):.6f}", flush=True)


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=int(sys.argv[1]),
            per_device_train_batch_size=16,
            dataloader_num_workers=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=arguments,
            train_dataset=Sentences(),
            callbacks=[Printed()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
