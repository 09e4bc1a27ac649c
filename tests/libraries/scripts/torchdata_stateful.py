"""Takes the state of torchdata's StatefulDataLoader in mid-epoch, and loads it into another."""

import io

import torch
import zoo
from torchdata.stateful_dataloader import StatefulDataLoader


def loader() -> StatefulDataLoader[tuple[torch.Tensor, int]]:
    return StatefulDataLoader(zoo.Images(), zoo.BATCH_SIZE, shuffle=True, num_workers=2)


def main() -> None:
    torch.manual_seed(3)
    first = loader()
    for batch in first:
        zoo.took(batch)
    for number, batch in enumerate(first):
        zoo.took(batch)
        if number == 9:
            break
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    # As a process does that starts anew.
    torch.manual_seed(99)
    second = loader()
    second.load_state_dict(torch.load(file))
    for _ in range(2):
        for batch in second:
            zoo.took(batch)


if __name__ == "__main__":
    main()
