"""torchrun, run in this process, so that the first failing rank and its exit code are not lost.

torchrun itself exits 1 whatever its ranks did. Started by the launcher as
`python -m stoker.launch.elastic OPTIONS -- CMD`; OPTIONS are torchrun's own.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from stoker import settings
from stoker.launch.failures import Cause, RankEnd, first_cause, read_failure, write_cause


def main(arguments: list[str]) -> int:
    """Runs the ranks of this host; gives the exit code of the one that failed first."""
    output = settings.from_environment().output
    try:
        run(get_args_parser().parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as err:
        failures = sorted(err.failures.items(), key=lambda item: item[1].timestamp)
        ends = [
            RankEnd(
                rank=rank,
                exit_code=_shell_code(failure.exitcode),
                failure=read_failure(output, rank) if output else None,
            )
            for rank, failure in failures
        ]
        cause = first_cause(ends)
        if output:
            write_cause(output, Cause(rank=cause.rank, exit_code=cause.exit_code))
        return cause.exit_code
    except SignalException as err:
        return 128 + int(err.sigval)
    return 0


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
