"""`python -m stoker.launch.engines.tf_server`: a worker or parameter server of TF_CONFIG.

What TensorFlow's ParameterServerStrategy needs beside the training, which is the chief: one server
for each task of the cluster that TF_CONFIG describes.
"""

import sys

from stoker.errors import StokerError
from stoker.launch.engines.tensorflow import end, imported, until_asked


def main() -> int:
    """Serves until it is asked to end; 2 without TensorFlow or TF_CONFIG."""
    try:
        distribute = imported().distribute
    except StokerError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code
    resolver = distribute.cluster_resolver.TFConfigClusterResolver()
    if not resolver.task_type:
        sys.stderr.write("error: TF_CONFIG names no task\nwhere: the command's environment\n")
        return 2
    server = distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        start=True,
    )
    print(f"{resolver.task_type} {resolver.task_id} listens: {server.target}", flush=True)
    until_asked()
    end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
