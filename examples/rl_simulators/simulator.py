"""Steps simulated environments with the policy it is handed, for a learner on another host.

As a server: `python simulator.py --listen ADDRESS:PORT --secret-file FILE`. Each connection gets a
process with its own environments. Who connects must know the secret; the rest is in plain text.
"""

import argparse
import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import gymnasium as gym
import numpy as np

# Weights and biases of a network with tanh between its layers, from observations to logits.
Weights = list[np.ndarray]


class Simulation:
    """Environments that continue from one rollout to the next.

    Args:
        environment: Name that gymnasium knows, with discrete actions.
        num_environments: Stepped together.
        seed: Of the environments and of the choice of actions.
    """

    def __init__(self, environment: str, *, num_environments: int, seed: int) -> None:
        self._environments = gym.vector.SyncVectorEnv(
            [lambda: gym.make(environment)] * num_environments,
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        )
        self._random = np.random.default_rng(seed)
        self._observations, _ = self._environments.reset(seed=seed)
        self._returns = np.zeros(num_environments)

    def rollout(self, weights: Weights, *, steps: int) -> dict[str, np.ndarray]:
        """Steps each environment so many times under a policy.

        Arrays of shape (steps, environments, ...): observations, actions, log_probabilities,
        rewards, next_observations (of an ended episode: its last), terminated, ended; and returns
        of the episodes that ended, of shape (episodes,).
        """
        found: dict[str, list[np.ndarray]] = {}
        returns: list[float] = []
        for _ in range(steps):
            actions, log_probabilities = self._chosen(weights)
            after, rewards, terminated, truncated, info = self._environments.step(actions)
            ended = terminated | truncated
            last = after
            self._returns += rewards
            if ended.any():
                last = after.copy()
                last[ended] = np.stack(list(info["final_obs"][ended]))
                returns += list(self._returns[ended])
                self._returns[ended] = 0.0
            for name, value in (
                ("observations", self._observations),
                ("actions", actions),
                ("log_probabilities", log_probabilities),
                ("rewards", rewards.astype(np.float32)),
                ("next_observations", last),
                ("terminated", terminated),
                ("ended", ended),
            ):
                found.setdefault(name, []).append(value)
            # The environments write into their array at the next step.
            self._observations = after.copy()
        return {name: np.stack(values) for name, values in found.items()} | {
            "returns": np.array(returns, np.float32)
        }

    def _chosen(self, weights: Weights) -> tuple[np.ndarray, np.ndarray]:
        """Draws an action for each environment; returns also the logarithm of its probability."""
        hidden = self._observations
        *layers, (matrix, bias) = zip(weights[::2], weights[1::2], strict=True)
        for layer, offset in layers:
            hidden = np.tanh(hidden @ layer.T + offset)
        logits = hidden @ matrix.T + bias
        logits = logits - logits.max(1, keepdims=True)
        log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        # Gumbel's trick: the largest of logits with such noise is drawn with their probabilities.
        actions = (logits + self._random.gumbel(size=logits.shape)).argmax(1)
        rows = np.arange(len(actions))
        return actions, log_probabilities[rows, actions].astype(np.float32)


def serve(connection: Connection, num_processes: int) -> None:
    """Answers a learner until it hangs up: first how many of us there may be, then rollouts."""
    with connection, contextlib.suppress(EOFError, ConnectionError):
        connection.send(num_processes)
        environment, num_environments, seed = connection.recv()
        simulation = Simulation(environment, num_environments=num_environments, seed=seed)
        while True:
            weights, steps = connection.recv()
            connection.send(simulation.rollout(weights, steps=steps))


def main(arguments: Sequence[str] | None = None) -> None:
    """Listens until it is asked to end."""
    parser = argparse.ArgumentParser(description="Simulates for a learner.")
    parser.add_argument("--listen", required=True, metavar="ADDRESS:PORT")
    parser.add_argument("--secret-file", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1, help="that a learner may ask for")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, _, port = options.listen.rpartition(":")
    secret = options.secret_file.read_bytes()
    with Listener((host.strip("[]"), int(port)), backlog=64, authkey=secret) as listener:
        print(f"the simulator listens on {options.listen}", flush=True)
        while True:
            try:
                connection = listener.accept()
            except (OSError, EOFError, multiprocessing.AuthenticationError):
                # A port check, or a peer without the secret.
                continue
            process = multiprocessing.Process(
                target=serve, args=(connection, options.processes), daemon=True
            )
            process.start()
            connection.close()


if __name__ == "__main__":
    main()
