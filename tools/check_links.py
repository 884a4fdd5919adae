#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every link of the documents must have its target in the repository: the file, and the heading if the link names one. And the site's
navigation must have every document but those beside tests, or the list of its folder.

usage: tools/check_links.py [ROOT]
"""

import pathlib
import re
import sys

LINK = re.compile(r"\]\(\s*<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)", re.M)
OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)  # https:, mailto:


def documents(root):
    """The Markdown files of the repository."""
    found = [path for pattern in ("*.md", "docs/**/*.md", "bench/results/*.md", "tests/cases/*.md") for path in root.glob(pattern)]
    return sorted(found)


def prose(text, spans=False):
    """The text with code blocks (and, unless asked for, code spans) blanked, line for line."""
    lines, fence = [], None
    for line in text.split("\n"):
        mark = re.match(r" *(```+|~~~+)", line)
        if mark and fence is None:
            fence = mark[1]
        elif mark and fence is not None and mark[1].startswith(fence):
            fence, line = None, ""
        lines.append("" if fence is not None else line)
    text = re.sub(r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), "\n".join(lines), flags=re.S)
    return text if spans else re.sub(r"`[^`\n]+`", "", text)


def anchor(heading):
    """What GitHub and the site make of a heading: lower case, no punctuation, a hyphen for each space."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text):
    """The anchors of a document. A heading that stands twice has one: the numbers of others differ between renderers."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", prose(text, spans=True), re.M)
    return {anchor(heading) for heading in headings} | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def faults_of(document, root):
    """(line, what is wrong) of each bad link, and the number of links."""
    text = prose(document.read_text(encoding="utf-8"))
    faults, count = [], 0
    for link in LINK.finditer(text):
        target = link[1] or link[2]
        if OUTSIDE.match(target):
            continue
        count += 1
        line = text.count("\n", 0, link.start()) + 1
        path, _, fragment = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        if path.startswith("/") or not there.is_relative_to(root):
            faults.append((line, f"{target} leads out of the repository"))
        elif not there.exists():
            faults.append((line, f"{target} does not exist"))
        elif fragment and (there.suffix != ".md" or fragment not in anchors(there.read_text(encoding="utf-8"))):
            faults.append((line, f"{target}: no such heading" if there.suffix == ".md" else f"{target}: lines of a source move"))
    return faults, count


def not_in_navigation(root):
    """The documents that a reader of the site would not find. Of a folder, index.md is a list of its pages (tools/docs/build.py)."""
    site = root / "tools/docs/mkdocs.yml"
    if not site.exists():
        return []
    named = set(re.findall(r"^ +- .*: (\S+\.md)$", site.read_text(encoding="utf-8").split("\nnav:\n")[1], re.M))
    paths = [path.relative_to(root) for path in documents(root)]
    return [path for path in paths if not named & {path.as_posix(), (path.parent / "index.md").as_posix()} and path.parts[0] != "tests"]


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1]).resolve()
    checked = bad = 0
    for document in documents(root):
        faults, count = faults_of(document, root)
        checked += count
        bad += len(faults)
        for line, what in faults:
            print(f"{document.relative_to(root)}:{line}: {what}")
    for path in not_in_navigation(root):
        bad += 1
        print(f"{path} is not in the navigation of tools/docs/mkdocs.yml")
    print(f"{checked} links, {bad} faults")
    return 1 if bad or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
