"""`python -m stoker.launch.engines.tf_server` runs a worker or parameter server of TF_CONFIG.

TensorFlow's ParameterServerStrategy needs, next to the training, which is the chief, one server for
each task of the cluster that TF_CONFIG describes.
"""

import sys

from stoker.errors import StokerError
from stoker.host import cpu
from stoker.launch.engines.tensorflow import end, imported, until_asked


def main() -> int:
    """Serves until it is asked to end; returns 2 without TensorFlow or TF_CONFIG."""
    try:
        tensorflow = imported()
    except StokerError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code
    distribute = tensorflow.distribute
    resolver = distribute.cluster_resolver.TFConfigClusterResolver()
    if not resolver.task_type:
        sys.stderr.write("error: TF_CONFIG names no task\nwhere: the command's environment\n")
        return 2
    cluster = resolver.cluster_spec()
    num_tasks = sum(cluster.num_tasks(job) for job in cluster.jobs)
    server = distribute.Server(
        cluster,
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        config=tensorflow.compat.v1.ConfigProto(
            # On a host of few cores, steps that wait for each other would take all threads.
            inter_op_parallelism_threads=max(cpu.usable_vcpus(), num_tasks + 1)
        ),
        start=True,
    )
    print(f"{resolver.task_type} {resolver.task_id} listens: {server.target}", flush=True)
    until_asked()
    end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
