"""Called as the site is built: writes the reference of the public names, and looks at the pages.

A page says `<!-- api: NAME NAME ... -->` where they go. What stands there is read from the sources
(signatures and docstrings), so that it cannot be older than the code, and needs no PyTorch. A page
that would load something from elsewhere is a warning, which ends a strict build.
"""

import ast
import logging
import re
from pathlib import Path
from typing import Any

import partita

log = logging.getLogger("mkdocs.hooks.site")  # warnings below mkdocs are counted

MARK = re.compile(r"<!-- api: (.*?) -->", re.S)
ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|link rel=\"?(?:stylesheet|icon|preload)\"?)\b[^>]*"
    r"(?:src|href)=\"?((?:https?:)?//[^\"> ]*)"
)
PACKAGE = Path(partita.__file__).parent
Defined = ast.FunctionDef | ast.ClassDef


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return MARK.sub(lambda match: "\n".join(map(reference, match[1].split())), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with every page as it will be written."""
    for address in ELSEWHERE.findall(output):
        log.warning("%s loads %s from elsewhere", page.file.src_path, address)
    return output


def reference(name: str) -> str:
    """The section of a public name: how it is called, what it says, what it has."""
    module, _, original = partita._PUBLIC[name].partition(":")
    found = definitions(module, original or name)
    shown = found[:-1] or found  # the overloads of a function, where it has any
    lines = [f"{name}{_signature(one)}" for one in shown if isinstance(one, ast.FunctionDef)]
    fence = ["```python", *lines, "```", ""] if lines else []
    return "\n".join([f"### {name}", "", *fence, _words(found[-1]), *_members(found[-1]), ""])


def definitions(module: str, name: str) -> list[Defined]:
    """Where a name is defined, followed through what packages import; overloads first."""
    tree = ast.parse(_file(module).read_text())
    here = [n for n in tree.body if isinstance(n, Defined) and n.name == name]
    if here:
        return here
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definitions(node.module, alias.name)
    raise LookupError(f"{name} is not defined in {module}")


def _file(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _signature(function: ast.FunctionDef) -> str:
    """As it would be typed, one argument per line where it is long."""
    arguments = ast.unparse(function.args)
    gives = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    if len(arguments) > 70:
        arguments = "\n    " + ",\n    ".join(_split(arguments)) + "\n"
    return f"({arguments}){gives}"


def _split(arguments: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _words(thing: Defined) -> str:
    """The docstring; indented parts stay code."""
    return ast.get_docstring(thing) or ""


def _members(thing: Defined) -> list[str]:
    """Fields, properties and methods of a class, each with its first sentence."""
    if isinstance(thing, ast.FunctionDef):
        return []
    rows = []
    for node in thing.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rows.append((node.target.id, f"`{ast.unparse(node.annotation)}`"))
        elif isinstance(node, ast.FunctionDef):
            is_property = any(ast.unparse(mark) == "property" for mark in node.decorator_list)
            words = (ast.get_docstring(node) or "").split("\n")[0]
            rows.append((node.name if is_property else f"{node.name}()", words))
    public = [(name, words) for name, words in rows if not name.startswith("_") and words]
    if not public:
        return []
    shown = [f"| `{name}` | {_cell(words)} |" for name, words in public]
    return ["", "| has | what it is |", "|---|---|", *shown]


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")
