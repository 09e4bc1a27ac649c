"""Every parser reads the YAML of manifests alike."""

import re
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker.platforms.kubernetes.manifest import manifest

# What YAML 1.1 or 1.2, by their letter or by the parsers that kubectl has had, take for no text.
_NO_TEXT = re.compile(
    r"""^(~|null|true|false|yes|no|on|off|y|n|<<|=
    |[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-f_]+|[0-9][0-9_]*(:[0-5]?[0-9])*)
    |[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?
    |[-+]?\.(inf|nan)|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|)$""",
    re.VERBOSE | re.IGNORECASE,
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
trees: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda children: st.lists(children) | st.dictionaries(texts, children),
    max_leaves=6,
)


@given(st.dictionaries(texts, trees))
def test_a_manifest_reads_as_it_was_written(document):
    assert yaml.safe_load(manifest([document])) == document


@given(texts | st.from_regex(_NO_TEXT, fullmatch=True))
def test_a_text_is_never_taken_for_something_else(text):
    written = manifest([{"a": text}]).removeprefix("a:").strip()
    if _NO_TEXT.match(text):
        assert written[0] in "'\"|", written
