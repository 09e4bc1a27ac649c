"""Makes pictures with questions and answers: coloured shapes, JPEGs of different sizes."""

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"red": (210, 50, 40), "green": (50, 160, 70), "blue": (50, 80, 200)}
SHAPES = ("circle", "square")
PICTURES_EACH = 2
LEAST_SIDE, MOST_SIDE, QUALITY = 480, 960, 90


def make_documents(folder: Path, *, count: int) -> None:
    """Makes `count` documents, the same every time, unless `folder` is there already.

    A folder that is there is whole: it gets its name last.
    """
    if folder.exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    lines = [json.dumps(make_document(part, number)) for number in range(count)]
    (part / "documents.jsonl").write_text("\n".join(lines) + "\n")
    part.rename(folder)


def make_document(folder: Path, number: int) -> dict[str, object]:
    """Writes a document's pictures; returns its line."""
    random = np.random.default_rng(number)
    names, phrases = [], []
    for place in range(PICTURES_EACH):
        colour = str(random.choice(list(COLOURS)))
        shape = str(random.choice(SHAPES))
        name = f"{number:05}-{place}.jpg"
        draw(random, COLOURS[colour], shape).save(folder / name, quality=QUALITY)
        names.append(name)
        phrases.append(f"a {colour} {shape}")
    # Answers of different lengths: their batches are padded.
    details = " on a table" * int(random.integers(0, 12))
    answer = " and ".join(phrases) + details
    return {"pictures": names, "question": "What do the pictures show?", "answer": answer}


def draw(random: np.random.Generator, colour: tuple[int, int, int], shape: str) -> Image.Image:
    """Returns a noisy picture of a random size with one shape in it."""
    width, height = (int(side) for side in random.integers(LEAST_SIDE, MOST_SIDE, 2))
    small = random.integers(120, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)
    pencil = ImageDraw.Draw(picture)
    side = min(width, height) // 2
    left, top = int(random.integers(0, width - side)), int(random.integers(0, height - side))
    outline = pencil.ellipse if shape == "circle" else pencil.rectangle
    outline((left, top, left + side, top + side), fill=colour)
    return picture
