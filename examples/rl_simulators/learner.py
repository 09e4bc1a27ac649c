"""Learns a policy by proximal policy optimization from environments that others simulate.

By itself it simulates in its own process. Where SIMULATORS is set, as under the `engine:` of
configs/rl-simulators.yaml, the simulators on the data hosts do, while it learns from what they
have sent before: its trajectories are then one update old, which the clipped ratio allows for.
"""

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from simulator import Simulation, Weights
from torch import nn

import stoker

Rollout = dict[str, np.ndarray]
DISCOUNT, TRACE = 0.99, 0.95
CLIP = 0.2
WIDTH = 64
EPISODES = 100


class Policy(nn.Module):
    """Computes logits of actions, and the value of observations."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()
        self.actor = layers(num_inputs, num_actions, last_gain=0.01)
        self.critic = layers(num_inputs, 1, last_gain=1.0)

    def weights(self) -> Weights:
        """Returns what a simulator needs of it."""
        return [parameter.detach().cpu().numpy().copy() for parameter in self.actor.parameters()]


def layers(num_inputs: int, num_outputs: int, *, last_gain: float) -> nn.Sequential:
    """Returns a network of two hidden layers."""
    linear = [
        nn.Linear(num_inputs, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, num_outputs),
    ]
    for layer, gain in zip(linear, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


def learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: list[Rollout],
    *,
    epochs: int,
    batch_size: int,
) -> None:
    """Updates the policy once, from the rollouts of all simulators."""

    def whole(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([rollout[name] for rollout in rollouts], axis=1))

    observations, actions, before = whole("observations"), whole("actions"), whole("rewards")
    with torch.no_grad():
        values = policy.critic(observations).squeeze(-1)
        after = policy.critic(whole("next_observations")).squeeze(-1)
    surprise = before + DISCOUNT * after * ~whole("terminated") - values
    goes_on = (~whole("ended")).float()
    advantages = torch.zeros_like(surprise)
    following = torch.zeros(surprise.shape[1])
    for step in reversed(range(len(surprise))):
        following = surprise[step] + DISCOUNT * TRACE * goes_on[step] * following
        advantages[step] = following
    targets = (advantages + values).flatten()
    advantages = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
    observations, actions = observations.flatten(0, 1), actions.flatten()
    old = whole("log_probabilities").flatten()
    for _ in range(epochs):
        for rows in torch.randperm(len(actions)).split(batch_size):
            chances = torch.distributions.Categorical(logits=policy.actor(observations[rows]))
            ratio = (chances.log_prob(actions[rows]) - old[rows]).exp()
            gain = torch.minimum(
                ratio * advantages[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[rows]
            ).mean()
            error = (policy.critic(observations[rows]).squeeze(-1) - targets[rows]).square().mean()
            optimizer.zero_grad()
            (0.5 * error - gain - 0.01 * chances.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


def simulated_here(
    options: argparse.Namespace, weights: Callable[[], Weights]
) -> Iterator[list[Rollout]]:
    """Yields rollouts of this process, one after the other."""
    simulation = Simulation(
        options.environment, num_environments=options.environments, seed=options.seed
    )
    while True:
        yield [simulation.rollout(weights(), steps=options.steps)]


def simulated_by(
    connections: Sequence[Connection], options: argparse.Namespace, weights: Callable[[], Weights]
) -> Iterator[list[Rollout]]:
    """Yields rollouts of simulators, which make the next ones while the caller learns."""
    share = -(-options.environments // len(connections))
    for number, connection in enumerate(connections):
        connection.send((options.environment, share, options.seed + number))
        connection.send((weights(), options.steps))
    while True:
        rollouts = [connection.recv() for connection in connections]
        for connection in connections:
            connection.send((weights(), options.steps))
        yield rollouts


def connect(addresses: str, secret_file: str) -> list[Connection]:
    """Opens a connection to each process that each of the simulators offers."""
    secret = Path(secret_file).read_bytes()
    connections: list[Connection] = []
    for address in addresses.split(","):
        host, _, port = address.rpartition(":")
        num_processes = 1
        number = 0
        while number < num_processes:
            connections.append(Client((host.strip("[]"), int(port)), authkey=secret))
            num_processes = connections[-1].recv()
            number += 1
    return connections


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Learns a policy.")
    parser.add_argument("--environment", default="CartPole-v1", help="of gymnasium")
    parser.add_argument("--environments", type=int, default=16, help="stepped together, in all")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--steps", type=int, default=128, help="of each environment, an update")
    parser.add_argument("--epochs", type=int, default=4, help="over the steps of an update")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    metrics = os.environ.get("STOKER_METRICS")
    parser.add_argument("--metrics", default=metrics, help="write what was reached to this file")
    return parser.parse_args(arguments)


def steps_of(rollouts: list[Rollout]) -> int:
    """Counts the steps of all environments together."""
    return sum(rollout["rewards"].size for rollout in rollouts)


def main(arguments: Sequence[str] | None = None) -> float:
    """Learns, prints a line every ten updates, and returns the mean return of the last episodes."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    with gym.make(options.environment) as sample:
        policy = Policy(sample.observation_space.shape[0], int(sample.action_space.n))
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.learning_rate, eps=1e-5)
    simulators = os.environ.get("SIMULATORS")
    if simulators:
        connections = connect(simulators, os.environ["SIMULATORS_SECRET_FILE"])
        source = simulated_by(connections, options, policy.weights)
        print(f"{len(connections)} simulators, on {simulators}", flush=True)
    else:
        source = simulated_here(options, policy.weights)
        print("simulated by this process", flush=True)
    returns: deque[float] = deque(maxlen=EPISODES)
    num_steps = 0
    started = time.monotonic()
    # In a run, what each update waits for its trajectories is written down; its samples are steps.
    batches = iter(stoker.timed(source, samples=steps_of))
    for update in range(1, options.updates + 1):
        rollouts = next(batches)
        for rollout in rollouts:
            returns.extend(rollout["returns"].tolist())
        num_steps += steps_of(rollouts)
        learn(policy, optimizer, rollouts, epochs=options.epochs, batch_size=options.batch_size)
        if update % 10 == 0 or update == options.updates:
            seconds = time.monotonic() - started
            print(
                f"update {update}/{options.updates}  return {np.mean(returns):.1f}"
                f"  {num_steps} steps  {num_steps / seconds:.0f} steps/s",
                flush=True,
            )
    reached = float(np.mean(returns))
    if options.metrics:
        speed = num_steps / (time.monotonic() - started)
        reached_metrics = {"return": reached, "env_steps_per_second": speed}
        Path(options.metrics).write_text(json.dumps(reached_metrics))
    if "SM_MODEL_DIR" in os.environ:
        torch.save(policy.state_dict(), Path(os.environ["SM_MODEL_DIR"]) / "model.pt")
    return reached


if __name__ == "__main__":
    main()
