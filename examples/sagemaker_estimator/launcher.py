"""Script mode enters here: this starts stoker's launcher in an image that is not its own.

AWS's PyTorch images start this file on every host of every group. It becomes the launcher, which
finds out which group its host is in, and on the dnn group starts the command. What the toolkit adds
as arguments is left alone: the launcher puts the hyperparameters behind the command itself.
"""

import json
import os
import shutil

COMMAND = ["python", "train.py"]

if __name__ == "__main__":
    command = json.loads(os.environ.get("STOKER_COMMAND") or json.dumps(COMMAND))
    stoker = shutil.which("stoker")
    if stoker is None:
        raise SystemExit("error: stoker is not installed\ntry:   add it to requirements.txt")
    # The same process, so that SageMaker's SIGTERM reaches the launcher itself.
    os.execv(stoker, ["stoker", "launch", "--", *command])
