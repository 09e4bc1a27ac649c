"""Goes through a loader that accelerate prepared, and skips batches as after a resume."""

import torch
import zoo
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    images = torch.stack([zoo.image(index) for index in range(zoo.SAMPLES)])
    model = torch.nn.Linear(48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(images), zoo.BATCH_SIZE, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for (batch,) in loader if not epoch else accelerator.skip_first_batches(loader, 3):
            zoo.took(batch)
            loss = model(batch.flatten(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
