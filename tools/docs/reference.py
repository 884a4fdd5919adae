# SPDX-License-Identifier: Apache-2.0
"""The API reference as Markdown: attune.h, ops.h and attune.hpp from their comments, the Python package from its docstrings.

Sources are read, not run: nothing has to be built. What the library exports and a page lacks is an error.
"""

import ast
import pathlib
import re
import textwrap

NAMED = re.compile(r"(?<![\w`/.])(__\w+__|(?:attune_|ATTUNE_)\w+|[a-z]+[a-z0-9]*(?:_[a-z0-9]+)+|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?![\w`/]|\.(?:md|h|py))")

# Of the modules that stand in for others: what those have, and how they are switched on.
OTHERS_NAMES = re.compile(r"flash_|get_mla|get_scheduler|FlashMLA|context_attention|unified_attention|varlen_attn|attention$|register$|activate$")


def escape(text):
    """Prose of a comment or docstring as Markdown: names in code style, angle brackets and stars as they are."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        plain = parts[i].replace("<", "&lt;").replace("*", "\\*")
        plain = re.sub(r"\bdocs/([a-z]+)\.md\b", r"[docs/\1.md](../\1.md)", plain)
        parts[i] = NAMED.sub(r"`\1`", plain)
    return "".join(parts)


def prose(comment):
    """The text of a comment without its marks; lists get the blank line in front that Markdown asks for."""
    comment = re.sub(r"^/\*|\*/$", "", comment.strip())
    lines = [re.sub(r"^\s*(?:\* ?|// ?)", "", line) for line in comment.split("\n")]
    lines[0] = lines[0].lstrip()
    out, kind = [], "text"
    for line in lines:
        before = kind
        if re.match(r"^ *(?:-|\d+\.) ", line):
            kind = "list"
            text = escape(line.lstrip())
        elif line.startswith("  ") and before == "list":
            text = "    " + escape(line.lstrip())
        elif line.startswith("  "):  # a formula or a program
            kind = "code"
            text = "    " + line[2:]
        else:
            kind = "text" if line else before
            text = escape(line)
        if kind != before:
            out.append("")
        out.append(text)
    return "\n".join(out).strip()


def code(language, text):
    return f"```{language}\n{text.rstrip()}\n```\n"


def entry(names, text, language, declaration, module=""):
    """One item: a heading, what it says, its declaration; each name is an anchor, behind its module's."""
    marks = "".join(f'<a id="{anchor_of(name)}"></a>' for name in names[1:])
    title = ", ".join(f"`{name}`" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    parts = [f"### {title} {{ #{anchor_of(module + names[0])} }}", marks, text, code(language, declaration)]
    return "\n\n".join(part for part in parts if part)


def anchor_of(name):
    return re.sub(r"[^\w-]+", "-", name)


def chunks(text):
    """Splits a header at blank lines that are not within braces or a comment."""
    current, depth, comment = [], 0, False
    for line in text.split("\n"):
        if not line.strip() and depth == 0 and not comment:
            if current:
                yield "\n".join(current)
            current = []
            continue
        current.append(line)
        bare = re.sub(r"/\*.*?\*/|//.*", "", line)
        if comment or "/*" in bare:
            comment = "*/" not in line if comment else True
        else:
            depth += bare.count("{") - bare.count("}")
    if current:
        yield "\n".join(current)


def c_page(*headers):
    """attune.h and ops.h: a section for each of their rules, an entry for each declaration. The first has the conventions."""
    texts = [header.read_text() for header in headers]
    text = "\n".join(texts)
    intro = re.match(r"/\*.*?\*/", text, re.S)[0]
    page = ["# C API\n", prose(re.sub(r"SPDX[^\n]*\n \*\n", "", intro)), "\n"]
    body = "\n".join(part[part.index("/* ---") :].split("#ifdef __cplusplus")[0] for part in texts)
    seen = set()
    for chunk in chunks(body):
        rule = re.match(r"/\* -{5,} (.+?) \*/", chunk)
        if rule:
            page.append(f"## {rule[1].capitalize()}\n")
            chunk = chunk[rule.end() :].strip("\n")
        for comment, declaration in declarations(chunk):
            names = re.findall(r"^ATTUNE_API [\w ]+[ *]+(\w+)\(|^\} (\w+);|^typedef enum (\w+) \{.*|^typedef struct (\w+) \1;|\(\*(\w+)\)", declaration, re.M)
            names = list(dict.fromkeys(name for group in names for name in group if name))
            simple = re.match(r"typedef struct (\w+) \1;", declaration)
            names = [simple[1]] if simple else names
            if names:
                seen.update(names)
                page.append(entry(names, prose(comment), "c", declaration))
            elif comment:
                page.append(prose(comment) + "\n")
    exported = set(re.findall(r"^ATTUNE_API [\w ]+[ *]+(\w+)\(", text, re.M)) | set(re.findall(r"^typedef (?:struct|enum) (\w+)", text, re.M))
    check("the C API", exported, seen)
    return "\n".join(page)


def declarations(chunk):
    """(comment, declarations that it speaks of) in turn; a declaration without a comment follows the one above."""
    pieces, comment, current = [], "", []
    rest = chunk
    while rest:
        found = re.match(r"/\*.*?\*/\n?", rest, re.S)
        if found:
            if current:
                pieces.append((comment, "\n".join(current)))
                comment, current = "", []
            comment += found[0] + "\n" if comment else found[0]
            rest = rest[found.end() :]
            continue
        statement = re.match(r"(?:typedef (?:enum|struct)[^;{]*\{.*?\n?\} ?\w+;|[^;]*;)[^\n]*\n?", rest, re.S)
        if not statement:
            break
        current.append(statement[0].rstrip())
        rest = rest[statement.end() :]
    if current or comment:
        pieces.append((comment, "\n".join(current)))
    return pieces


def without_bodies(text):
    """C++ without the bodies of functions and what is private."""
    text = re.sub(r"\n private:.*?(?=\n\};)", "", text, flags=re.S)
    out, i = [], 0
    for body in iter(lambda: re.compile(r"\)((?: const)?(?: noexcept)?)(?: : [^{;]*(?:\{[^}]*\}[^{;]*)*?)? \{").search(text, i), None):
        out.append(text[i : body.start()] + ")" + body[1] + ";")
        i, depth = body.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            i += 1
    return "".join(out) + text[i:]


def cpp_page(header):
    text = header.read_text()
    intro = re.match(r"(?://[^\n]*\n)+", text)[0].split("\n", 1)[1]
    page = ["# C++ API\n", prose(intro), "\n"]
    body = re.sub(r"namespace detail \{.*?\}  // namespace detail\n", "", text[text.index("namespace attune {") :], flags=re.S)
    body = body.split("namespace attune {", 1)[1].split("}  // namespace attune\n")[0]
    seen = set()
    for chunk in chunks(body):
        rule = re.match(r"// --- (.+)", chunk)
        if rule:
            page.append(f"## {rule[1].capitalize()}\n")
            continue
        comment = re.match(r"(?://[^\n]*\n)*", chunk)[0]
        declaration = without_bodies(chunk[len(comment) :])
        names = re.findall(r"^(?:struct|class|concept) (\w+)|^using (\w+)|^(?:inline |constexpr )+[\w:<>&, ]*?(\w+)[({]|^Tensor (\w+)\(", declaration, re.M)
        names = list(dict.fromkeys(name for group in names for name in group if name))
        assert names, f"attune.hpp: no name is seen in\n{declaration}"
        if names[0] in seen:  # an overload
            page += [prose(comment), code("cpp", declaration)]
        else:
            page.append(entry(names, prose(comment), "cpp", declaration))
        seen.update(names)
    exported = set(re.findall(r"^(?:struct|class|concept) (\w+)", body, re.M)) | set(re.findall(r"^inline (?:[\w:<>]+ )+(\w+)\(", body, re.M))
    check("attune.hpp", exported, seen)
    return "\n".join(page)


def docstring(text):
    """A docstring as Markdown: Args, Returns and Raises become lists."""
    if not text:
        return ""
    out, section = [], None
    for line in text.split("\n"):
        head = re.match(r"^(Args|Returns|Raises):(.*)$", line)
        if head:
            section = head[1]
            out += ["", f"**{section}**{head[2]}", ""]
            continue
        if section is None:
            program = line.startswith("    ")
            if out and out[-1].strip() and program != out[-1].startswith("    "):
                out.append("")
            out.append(line if program else escape(line))
            continue
        if line and not line.startswith(" "):
            section = None
            out += ["", escape(line)]
            continue
        item = re.match(r"^    ([\w, ]+): (.*)$", line)
        if item and section == "Args":
            out.append(f"* **{', '.join(f'`{name.strip()}`' for name in item[1].split(','))}**: {escape(item[2])}")
        else:
            out.append(("    " if section == "Args" else "") + escape(line.strip()))
    return "\n".join(out).strip()


def signature(name, function, skip_self=False):
    arguments = function.args
    if skip_self:
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns is not None else ""
    one_line = f"{name}({ast.unparse(arguments)}){returns}"
    if len(one_line) <= 110:
        return one_line
    parts, depth, start, inside = [], 0, 0, ast.unparse(arguments)
    for i, letter in enumerate(inside):
        depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(inside[start:i].strip())
            start = i + 1
    lines = textwrap.wrap(", ".join(part.replace(" ", "\0") for part in [*parts, inside[start:].strip()]), 105)
    return f"{name}(\n" + "\n".join("    " + line.replace("\0", " ") for line in lines) + f"\n){returns}"


def definitions(path):
    """name -> the last definition of a module's functions and classes: overloads come before it, and under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    return tree, {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def python_entry(name, node, extra=(), module=""):
    shown, text = [], docstring(ast.get_docstring(node))
    if isinstance(node, ast.FunctionDef):
        shown.append(signature(name, node))
    else:
        methods = {child.name: child for child in [*extra, *node.body] if isinstance(child, ast.FunctionDef)}
        shown.append(signature(name, methods.pop("__init__"), True) if "__init__" in methods else f"class {name}({', '.join(map(ast.unparse, node.bases))})")
        for method, child in methods.items():
            if not method.startswith("_"):
                is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in child.decorator_list)
                shown.append(f"{name}.{method}: {ast.unparse(child.returns)}" if is_property else signature(f"{name}.{method}", child, True))
                text += f"\n\n`{method}`: {docstring(ast.get_docstring(child))}" if ast.get_docstring(child) else ""
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
        shown += [ast.unparse(field) for field in fields]
    return entry([name], text, "python", "\n".join(shown), module)


def python_page(package):
    """attune: everything in __all__. Then the public functions of attune.compat and attune.integrations."""
    tree, _ = definitions(package / "__init__.py")
    listed = next(ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")
    core = definitions(package / "_core.pyi")[1]
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            known = definitions(package / f"{node.module}.py")[1]
            found.update({alias.name: known[alias.name] for alias in node.names if alias.name in known})
    check("attune.__all__", set(listed), set(found))
    page = ["# Python API\n", docstring(ast.get_docstring(tree)), "\n"]
    groups = {"Attention": ["attention", "sdpa", "Plan", "supported", "Support", "validate", "warm"],
              "Arguments": ["KVCache", "Prologue", "View", "Spec"],
              "Errors": ["Error", "InvalidArgument", "WrongType", "Unsupported", "OutOfMemory"]}
    groups["Other operations, tables and devices"] = sorted(set(listed) - set().union(*groups.values()), key=str.lower)
    for title, names in groups.items():
        page.append(f"## {title}\n")
        for name in names:
            node = found[name]
            bases = [base.attr for base in getattr(node, "bases", []) if isinstance(base, ast.Attribute)]
            page.append(python_entry(name, node, [child for base in bases for child in core[base].body]))
    for path in [*sorted((package / "compat").rglob("*.py")), *(package / f"integrations/{name}.py" for name in ("jax", "torch_flash", "transformers"))]:
        tree, known = definitions(path)
        module = ".".join(["attune", *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        public = {name: node for name, node in known.items() if OTHERS_NAMES.match(name)}
        if public:
            page += [f"## `{module}`\n", docstring(ast.get_docstring(tree)), "\n"]
        for name, node in public.items():
            page.append(python_entry(name, node, module=f"{module}."))
    return "\n".join(page)


def check(where, exported, seen):
    missing = exported - seen
    assert exported and not missing, f"{where}: the reference lacks {', '.join(sorted(missing))}"


def pages(root):
    """path in the site -> Markdown."""
    root = pathlib.Path(root)
    return {"docs/api/c.md": c_page(root / "include/attune/attune.h", root / "include/attune/ops.h"),
            "docs/api/cpp.md": cpp_page(root / "include/attune/attune.hpp"),
            "docs/api/python.md": python_page(root / "python/attune")}
