"""All pages of a listing of S3 are read, each once."""

import pytest

from stoker.platforms.aws import Aws


class Store:
    """Answers ListObjectsV2 with pages of two objects."""

    def __init__(self, num_objects: int) -> None:
        self.keys = [f"data/{number}" for number in range(num_objects)]
        self.asked: list[dict[str, object]] = []

    def list_objects_v2(self, **asked):
        self.asked.append(asked)
        first = int(asked.get("ContinuationToken", 0))
        after = first + 2
        more = {"IsTruncated": True, "NextContinuationToken": str(after)}
        page = {"Contents": [{"Key": key} for key in self.keys[first:after]]}
        return page | (more if after < len(self.keys) else {"IsTruncated": False})


@pytest.mark.parametrize("num_objects", [0, 1, 2, 3, 5])
def test_each_object_of_an_address_is_listed_once(num_objects):
    store = Store(num_objects)
    pages = [*Aws(region="eu-west-1", clients={"s3": store}).object_pages("s3://bucket/data/")]
    listed = [item["Key"] for page in pages for item in page["Contents"]]
    assert listed == store.keys
    assert {(asked["Bucket"], asked["Prefix"]) for asked in store.asked} == {("bucket", "data/")}
