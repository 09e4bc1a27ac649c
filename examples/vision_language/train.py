"""Trains a small vision-language model: documents of two pictures, a question and an answer.

A plain PyTorch script without a line of stoker's: `python examples/vision_language/train.py`. The
dataset decodes the pictures; the collate function calls the processor, which resizes, cuts,
tokenises and pads, as in most fine-tuning scripts.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from make_documents import make_documents
from PIL import Image
from processor import PATCH_NUMBERS, PICTURE, VOCABULARY, Processor
from torch import nn
from torch.utils.data import DataLoader, Dataset

MAX_PATCHES = 64
MAX_TOKENS = 384
# Of a label that the loss leaves out.
IGNORED = -100


class Documents(Dataset):
    """Documents with decoded pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = (folder / "documents.jsonl").read_text().splitlines()
        self.documents = [json.loads(line) for line in lines]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, object]:
        document = self.documents[index]
        return document | {"pictures": [self.decoded(name) for name in document["pictures"]]}

    def decoded(self, name: str) -> Image.Image:
        with Image.open(self.folder / name) as picture:
            return picture.convert("RGB")


class Collate:
    """Makes a batch of documents by the processor; all but padding and pictures is learned."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor

    def __call__(self, documents: Sequence[dict[str, object]]) -> dict[str, torch.Tensor]:
        texts = [self.processor.apply_chat_template(messages_of(each)) for each in documents]
        images = [document["pictures"] for document in documents]
        batch = self.processor(text=texts, images=images, max_length=MAX_TOKENS)
        labels = batch["input_ids"].clone()
        labels[labels == self.processor.pad_token_id] = IGNORED
        labels[labels == self.processor.image_token_id] = IGNORED
        return batch | {"labels": labels}


def messages_of(document: dict[str, object]) -> list[dict[str, object]]:
    """Returns a document as the conversation that a chat template reads."""
    pictures = [{"type": "image"} for _ in document["pictures"]]
    question = {"type": "text", "text": document["question"]}
    answer = {"type": "text", "text": document["answer"]}
    return [
        {"role": "user", "content": [*pictures, question]},
        {"role": "assistant", "content": [answer]},
    ]


class Model(nn.Module):
    """A causal transformer; patches take the places of the picture's tokens.

    Args:
        width: Of a token.
        layers: Of the transformer.
    """

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(MAX_TOKENS, width)
        self.patches = nn.Linear(PATCH_NUMBERS, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
        """Returns scores of each next token, of shape (batch, tokens, vocabulary).

        Padding is at the end, where no token before it sees it.
        """
        length = ids.shape[1]
        hidden = self.tokens(ids)
        seen = self.patches(patches).to(hidden.dtype)
        hidden = hidden.masked_scatter((ids == PICTURE)[..., None], seen)
        hidden = hidden + self.places(torch.arange(length, device=ids.device))
        later = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.head(self.body(hidden, mask=later, is_causal=True))


def loss_of(model: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the mean loss of the tokens that are learned."""
    scores = model(batch["input_ids"], batch["pixel_values"])[:, :-1]
    wanted = batch["labels"][:, 1:]
    return nn.functional.cross_entropy(
        scores.flatten(0, 1).float(), wanted.flatten(), ignore_index=IGNORED
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Trains a small vision-language model.")
    parser.add_argument("--data", type=Path, help="folder of documents; default: made in .cache")
    parser.add_argument("--documents", type=int, default=320, help="that are made")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--width", type=int, default=512 if has_gpu else 64, help="of a token")
    parser.add_argument("--layers", type=int, default=8 if has_gpu else 1)
    parser.add_argument("--batch-size", type=int, default=32 if has_gpu else 8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4, help="loader workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="write seconds and losses to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    folder = options.data or Path(".cache") / f"documents-{options.documents}"
    make_documents(folder, count=options.documents)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    dataset = Documents(folder)
    if len(dataset) < options.batch_size:
        least = f"--batch-size {options.batch_size}"
        raise SystemExit(f"{folder} has {len(dataset)} documents: fewer than {least}")
    batches = DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        pin_memory=device.type == "cuda",
        collate_fn=Collate(Processor(max_patches=MAX_PATCHES)),
    )
    model = Model(width=options.width, layers=options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []
    began = time.perf_counter()
    for epoch in range(options.epochs):
        epoch_began = time.perf_counter()
        for batch in batches:
            on_device = {
                name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()
            }
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(model, on_device)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses[-len(batches) :]).mean().item()
        rate = len(batches) * options.batch_size / (time.perf_counter() - epoch_began)
        print(f"epoch {epoch + 1}  loss {mean:.4f}  {rate:.1f} documents/s", flush=True)
    if options.record:
        # The last losses are awaited first: until then the device computes.
        values = [loss.item().hex() for loss in losses]
        seconds = time.perf_counter() - began
        record = {"seconds": seconds, "steps": len(losses), "losses": values}
        options.record.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
