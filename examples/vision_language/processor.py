"""A processor of pictures and text, as vision-language models have one; it is the collate function.

Like Qwen-VL's: a picture keeps its shape and is resized to a whole number of patches; each patch is
a token of the text, which is padded to the longest of the batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image

PATCH = 28
PATCH_NUMBERS = 3 * PATCH * PATCH
# Of the text: bytes, and four more.
PAD, PICTURE, USER, ASSISTANT = 256, 257, 258, 259
VOCABULARY = 260
# Of a label that the loss leaves out.
IGNORED = -100
_MEAN = np.array((0.481, 0.458, 0.408), np.float32)
_STD = np.array((0.269, 0.261, 0.276), np.float32)

Document = Mapping[str, object]


class Processor:
    """Makes a batch of documents: token numbers, labels, and the patches of all pictures.

    Args:
        max_patches: Of a picture.
        max_tokens: Of a document; what is beyond is cut.
    """

    def __init__(self, *, max_patches: int, max_tokens: int) -> None:
        self.max_patches = max_patches
        self.max_tokens = max_tokens

    def __call__(self, documents: Sequence[Document]) -> dict[str, torch.Tensor]:
        tokens, labels, patches = [], [], []
        for document in documents:
            pictures = [self.patches_of(picture) for picture in document["pictures"]]
            numbers, wanted = self.tokens_of(document, [len(part) for part in pictures])
            tokens.append(numbers)
            labels.append(wanted)
            patches.extend(pictures)
        ids = padded(tokens, PAD)
        return {
            "input_ids": ids,
            "attention_mask": ids != PAD,
            "labels": padded(labels, IGNORED),
            "pixel_values": torch.from_numpy(np.concatenate(patches)),
        }

    def patches_of(self, picture: Image.Image) -> np.ndarray:
        """Returns the patches of a picture, normalised, of shape (patches, 3 * 28 * 28)."""
        columns, rows = self.grid_of(picture.width, picture.height)
        size = (columns * PATCH, rows * PATCH)
        pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC), np.float32) / 255
        pixels = (pixels - _MEAN) / _STD
        parts = pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)
        return parts.reshape(rows * columns, PATCH_NUMBERS)

    def grid_of(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows of patches: of the picture's shape, as many as are allowed."""
        scale = (self.max_patches / (width * height)) ** 0.5
        columns = min(self.max_patches, max(1, int(width * scale)))
        rows = max(1, min(int(height * scale), self.max_patches // columns))
        return columns, rows

    def tokens_of(self, document: Document, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns a document's tokens and labels; only the answer is learned.

        Raises:
            ValueError: If the pictures alone are more than `max_tokens`.
        """
        question = [USER, *[PICTURE] * sum(sizes), *str(document["question"]).encode(), ASSISTANT]
        if len(question) > self.max_tokens:
            raise ValueError(f"a question has {len(question)} tokens: more than {self.max_tokens}")
        answer = [*str(document["answer"]).encode(), USER]
        numbers = question + answer
        labels = [IGNORED] * len(question) + answer
        return numbers[: self.max_tokens], labels[: self.max_tokens]


def padded(rows: Sequence[Sequence[int]], filler: int) -> torch.Tensor:
    """Returns the rows as one tensor, filled up to the longest."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler)
