"""Hook of mkdocs: puts the files that pages link to outside of ``docs/`` where the links of the built site lead."""

import re
import shutil
from pathlib import Path
from typing import Any

LINK = re.compile(r"\]\(\.\./([\w./-]+)")


def on_post_build(config: Any) -> None:
    """Copy them, by the links of all pages."""
    docs, site = Path(config["docs_dir"]), Path(config["site_dir"])
    for page in docs.rglob("*.md"):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            file, place = docs.parent / target, site / target
            if file.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
