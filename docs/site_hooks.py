"""The site needs more than mkdocs does: a list of pages that are there, the repository's files.

Pages link to files of the repository (a workload, a script, another README), as a forge can follow.
The site has a page for each file that is linked, below repository/, and links lead there.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# A link or picture of Markdown, and the pictures of HTML: what is in front, and the address.
_LINK = re.compile(r"(\]\(|\b(?:src|srcset|href)=\")([^)\s\"#]+)(?=[)\"#])")
_CODE = re.compile(r"^(`{3,}.*?^`{3,}|(?: {4}[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".json": "json", ".txt": "text"}


def on_config(config: Any) -> Any:
    """Takes pages out of the list that are not there."""
    config["nav"] = _present(config["nav"])
    return config


def _present(nav: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = []
    for entry in nav:
        ((title, target),) = entry.items()
        found = _present(target) if isinstance(target, list) else target
        if found and (isinstance(found, list) or (ROOT / "docs" / found).is_file()):
            kept.append({title: found})
    return kept


def on_files(files: Files, config: Any) -> Files:
    """Adds the files of the repository that pages link to, and those that these link to."""
    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        source = todo.pop()
        if not source.startswith("docs/"):
            files.append(_file(source, config))
        if not source.endswith(".md"):
            continue
        for _, address in _LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            target = _target(source, address)
            if target and target not in seen and not target.startswith("docs/"):
                seen.add(target)
                todo.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Points links out of the docs to the site's pages of these files."""
    uri = page.file.src_uri
    source = _repository_path(uri)
    if uri.startswith("repository/") and not source.endswith(".md"):
        return markdown

    def pointed(found: re.Match[str]) -> str:
        target = _target(source, found[2])
        if not target:
            return found[0]
        there = _uri(target)
        if there.endswith(".md") and not found[1].startswith("]"):
            there = there.removesuffix(".md") + ".html"
        return f"{found[1]}{posixpath.relpath(there, posixpath.dirname(uri) or '.')}"

    # Links in code are code.
    parts = _CODE.split(markdown)
    return "".join(
        part if _CODE.fullmatch(part) else _LINK.sub(pointed, part) for part in parts if part
    )


def on_page_content(html: str, **_: Any) -> str:
    """Shows a bar in the code of a table as a forge does: the escape is the table's alone."""
    return re.sub(r"<td[ >].*?</td>", lambda found: found[0].replace("\\|", "|"), html)


def _target(source: str, address: str) -> str:
    """Returns the repository's file that a link leads to; empty for one that leads elsewhere."""
    if ":" in address or address.startswith("/"):
        return ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), address))
    if (ROOT / path).is_dir() and (ROOT / path / "README.md").is_file():
        path = posixpath.join(path, "README.md")
    return path if (ROOT / path).is_file() else ""


def _uri(path: str) -> str:
    """Returns the place in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _repository_path(uri: str) -> str:
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _file(path: str, config: Any) -> File:
    text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    if not path.endswith(".md"):
        language = _LANGUAGES.get(os.path.splitext(path)[1], "text")
        text = f"# {path}\n\n````{language}\n{text.rstrip()}\n````\n"
    return File.generated(config, _uri(path), content=text)
