"""A small policy like ACT: from pictures and joints, a transformer predicts the next actions."""

import torch
from torch import nn


class Policy(nn.Module):
    """Predicts the next actions from one picture a camera and the angles of the joints.

    Args:
        joints: Angles of a state, and of an action.
        chunk: Actions that are predicted at once.
        width: Of the transformer.
    """

    def __init__(self, *, joints: int, chunk: int, width: int = 64) -> None:
        super().__init__()
        self.eyes = nn.Sequential(
            nn.Conv2d(3, 16, 8, stride=8),
            nn.ReLU(),
            nn.Conv2d(16, width, 10, stride=10),
            nn.ReLU(),
        )
        self.body = nn.Linear(joints, width)
        self.transformer = nn.Transformer(
            width,
            nhead=4,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dim_feedforward=2 * width,
            dropout=0.0,
            batch_first=True,
        )
        self.questions = nn.Parameter(torch.randn(1, chunk, width) / width**0.5)
        self.hand = nn.Linear(width, joints)

    def forward(self, pictures: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Returns actions of shape (batch, chunk, joints).

        Args:
            pictures: Float, of shape (batch, cameras, 3, height, width).
            state: Of shape (batch, joints).
        """
        batch, cameras = pictures.shape[:2]
        seen = self.eyes(pictures.flatten(0, 1)).flatten(2).transpose(1, 2)
        seen = seen.reshape(batch, cameras * seen.shape[1], seen.shape[2])
        known = torch.cat([self.body(state)[:, None], seen], dim=1)
        questions = self.questions.expand(batch, -1, -1)
        return self.hand(self.transformer(known, questions))
