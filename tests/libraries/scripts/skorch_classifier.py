"""Trains skorch's classifier of scikit-learn's kind, which makes its loaders itself."""

import numpy as np
import torch
import zoo
from skorch import NeuralNetClassifier
from skorch.dataset import ValidSplit


class Watched(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(48, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        zoo.took(images, training=self.training)
        return self.layer(images.flatten(1)).softmax(-1)


def main() -> None:
    torch.manual_seed(3)
    images = np.stack([zoo.image(index).numpy() for index in range(zoo.SAMPLES)])
    labels = np.arange(zoo.SAMPLES) % 2
    net = NeuralNetClassifier(
        Watched,
        max_epochs=2,
        batch_size=zoo.BATCH_SIZE,
        train_split=ValidSplit(4, stratified=True),
        iterator_train__shuffle=True,
        iterator_train__num_workers=2,
        iterator_valid__num_workers=1,
        verbose=0,
    )
    net.fit(images, labels)
    zoo.say(proba=zoo.digest(net.predict_proba(images)))


if __name__ == "__main__":
    main()
