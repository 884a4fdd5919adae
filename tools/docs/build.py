#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the site: gathers the documents, the API reference and the sources that they link to, and runs MkDocs over them.

Pages keep their paths in the repository, so links are those that GitHub follows. A link to a source leads to a page that shows it,
one to a folder to a list of its pages. MkDocs fails where a link or an anchor has no target; this script, where the navigation omits a
document, or a page would load anything from the network or shows Markdown as it is.
usage: tools/docs/build.py [FOLDER], build/site by default; the pages are in FOLDER/html
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
import check_links  # noqa: E402
import reference  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".h": "c", ".c": "c", ".py": "python", ".json": "json", ".sh": "bash"}
PICTURES = {".svg", ".png"}


def spaced(text):
    """What GitHub does without and MkDocs does not: blank lines before lists and tables, one word behind a fence."""
    out, fenced, kind = [], False, ""
    for line in text.split("\n"):
        before = kind
        if re.match(r" *(```|~~~)", line):
            fenced = not fenced
            line = re.sub(r"^( *(?:```|~~~)\w*) .*", r"\1", line)
        if fenced:
            kind = "code"
        elif re.match(r"(?:[*-]|\d+\.) ", line):
            kind = "list"
        elif line.startswith("|"):
            kind = "table"
        elif not line.strip():
            kind = ""
        else:
            kind = "list" if before == "list" else "text"
        if kind != before and kind in ("list", "table") and before not in ("", "code"):
            out.append("")
        out.append(line)
    return "\n".join(out)


class Pages:
    """Copies pages to a folder, and what they link to, and so on."""

    def __init__(self, folder):
        self.folder, self.done = folder, set()

    def add(self, path, text=None):
        """path: in the repository. text: what it holds, where it is not a file."""
        if path in self.done:
            return
        self.done.add(path)
        source = ROOT / path
        if text is None and source.is_dir():
            pages = sorted(page.name for page in source.glob("*.md"))
            text = f"# {path}\n\n" + "".join(f"* [{title(source / page)}]({page})\n" for page in pages)
            self.write(path / "index.md", text)
        elif text is None and path.suffix in PICTURES:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, self.folder / path)
        elif text is None and path.suffix != ".md":
            language = LANGUAGES.get(path.suffix, "text")
            self.write(path.with_name(path.name + ".md"), f"# {path}\n\n````{language}\n{source.read_text()}````\n")
        else:
            self.write(path, self.followed(path, spaced(source.read_text() if text is None else text)))

    def write(self, path, text):
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def followed(self, path, text):
        """The text, with the targets of its links added and their names those of the site's pages."""
        outside_code = check_links.prose(text).split("\n")
        lines = text.split("\n")
        for i, bare in enumerate(outside_code):
            for link in check_links.LINK.finditer(bare):
                target = link[1] or link[2]
                name, mark, fragment = target.partition("#")
                if not name or check_links.OUTSIDE.match(target):
                    continue
                there = pathlib.Path(os.path.normpath(path.parent / name))
                if there.parts[:2] == ("docs", "api") or not (ROOT / there).exists():
                    continue  # made here; or broken, which MkDocs reports
                self.add(there)
                if (ROOT / there).is_dir():
                    new = name.rstrip("/") + "/index.md"
                else:
                    new = name if there.suffix in {".md", *PICTURES} else name + ".md"
                lines[i] = lines[i].replace(f"]({target})", f"]({new}{mark}{fragment})")
        return "\n".join(lines)


def title(path):
    return re.search(r"^# (.+)$", path.read_text(), re.M)[1]


def check_pages(folder):
    """Pages load nothing from the network, and hold no Markdown that was not understood."""
    for page in folder.rglob("*.html"):
        text = page.read_text()
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text):
            if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag) and "rel=\"canonical\"" not in tag:
                sys.exit(f"{page.relative_to(folder)} loads from the network: {tag}")
        left = re.search(r"<p>[^<]*(?:```|\n(?:[*-]|\d+\.) |\n?\|[^<]*\|\n)[^<]*", re.sub(r"<pre.*?</pre>", "", text, flags=re.S))
        if left:
            sys.exit(f"{page.relative_to(folder)} has Markdown that MkDocs did not understand: {left[0][:100]}")


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/site").resolve()
    shutil.rmtree(folder / "pages", ignore_errors=True)
    pages = Pages(folder / "pages")
    for path, text in reference.pages(ROOT).items():
        pages.add(pathlib.Path(path), text)
    for path in check_links.documents(ROOT):
        pages.add(path.relative_to(ROOT))
    if omitted := check_links.not_in_navigation(ROOT):
        sys.exit(f"not in the navigation of tools/docs/mkdocs.yml: {', '.join(map(str, omitted))}")
    shutil.copy(ROOT / "tools/docs/site.css", folder / "pages")
    configuration = (ROOT / "tools/docs/mkdocs.yml").read_text()
    for lists in re.findall(r"(\S+)/index\.md$", configuration, re.M):
        pages.add(pathlib.Path(lists))
    (folder / "mkdocs.yml").write_text(configuration.replace("@FOLDER@", str(folder)))
    # Not --quiet: with it MkDocs does not see its own warnings.
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", folder / "mkdocs.yml"], check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit("\n".join(line for line in done.stdout.splitlines() if not line.startswith("INFO")))
    check_pages(folder / "html")
    print(f"{len(pages.done)} pages: {folder / 'html/index.html'}")


if __name__ == "__main__":
    main()
