"""`stoker train` runs a workload on a cluster, or prints the request for it.

A training run that Ctrl-C or SIGTERM stops keeps its record, and prints what is kept and how to
continue.
"""

import typer

from stoker.cli.options import AsJson, ModelFiles, Overrides, Words, Yes
from stoker.cli.step import TrainStep, train_step
from stoker.cli.training_flags import TrainingFlags


def train_verb(
    context: typer.Context,
    words: Words = None,
    *,
    flags: TrainingFlags,
    files: ModelFiles,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Train on the cluster of a decision, or on groups that you name.

    The record is training.json in the run's folder, unless --out names another file. The run's
    folder also has the logs and report.html.

    Examples:
        stoker train configs/mnist.yaml
        stoker train configs/mnist.yaml --decision decision.json
        stoker train --group dnn=1 --group data=local.c1:1 -- python train.py
    """
    return train_step(
        context,
        words,
        flags=flags,
        step=TrainStep(),
        files=files,
        overrides=overrides,
        as_json=as_json,
        yes=yes,
    )
