"""What a training step of a pipeline's own left: a job whose name nobody chose."""

from collections.abc import Mapping
from pathlib import Path

from stoker.platforms.aws import Aws, split_uri
from stoker.platforms.sagemaker.outputs import FOLDER, fetch_outputs

_OUTPUTS = "/output/output.tar.gz"


def fetch_training(uri: str, *, folder: Path, aws: Aws | None = None) -> Path | None:
    """Fetches training.json, with what lies beside it, of the newest job below `uri`.

    Args:
        uri: Of jobs' outputs: an s3:// folder with JOB/output/output.tar.gz.
        folder: Where it is unpacked to.
        aws: The account; absent: what boto3 finds.

    Returns:
        The file, or None where no job left one.

    Raises:
        PlatformError: If the outputs cannot be read.
    """
    account = aws or Aws()
    bucket, key = split_uri(uri.rstrip("/") + "/")
    # A step that was tried again has left a few jobs' outputs: one page holds them.
    listed = account.call("s3", "ListObjectsV2", Bucket=bucket, Prefix=key).get("Contents")
    found = [
        (str(item.get("LastModified", "")), str(item.get("Key", "")))
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, Mapping) and str(item.get("Key", "")).endswith(_OUTPUTS)
    ]
    if not found:
        return None
    unpacked = fetch_outputs(account, f"s3://{bucket}/{max(found)[1]}", folder=folder)
    file = unpacked / FOLDER / "training.json" if unpacked else None
    return file if file and file.is_file() else None
