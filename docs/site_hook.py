"""Hook of mkdocs: pages get their reference tables, the studies beside their experiments become
pages, and links to
code lead to a copy of the file.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file by its path

from make_reference import with_reference

LINK = re.compile(r"\]\(([\w./-]+)")
FROM_DOCS, FROM_A_STUDY = "](../experiments/", "](../../docs/"


def on_files(files: Any, config: Any) -> Any:
    """Add every study with its figures."""
    root = Path(config["docs_dir"]).parent
    for place in ("*/README.md", "*/figures/*.svg"):
        for path in sorted(root.glob(f"experiments/{place}")):
            name = str(path.relative_to(root))
            files.append(File(name, str(root), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The tables that a page asks for, and links to studies as the site places them:

    ``docs/`` is its root.
    """
    del page, config, files
    return (
        with_reference(markdown)
        .replace(FROM_DOCS, "](experiments/")
        .replace(FROM_A_STUDY, "](../../")
    )


def on_post_build(config: Any) -> None:
    """Copy the files outside of ``docs/`` that pages link to, by their links."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for page in [*docs.rglob("*.md"), *docs.parent.glob("experiments/*/README.md")]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            file = (page.parent / target).resolve()
            if file.is_file() and file.suffix != ".md" and not file.is_relative_to(docs):
                place = site / file.relative_to(docs.parent)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
