"""What a name in backticks may be: the names of the code, of its command line and of its files.

Nothing is listed here by hand. Words that are not the product's own stand in ``foreign_names.toml``, each with its
reason.
"""

from __future__ import annotations

import ast
import builtins
import fnmatch
import inspect
import json
import keyword
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import quietgrad
from quietgrad.cli import COMMANDS, app_of
from quietgrad.moved import MOVED

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "quietgrad"
ALIASES = {
    "qg": "quietgrad", "qt": "quietgrad.torch", "qd": "quietgrad.data", "np": "numpy", "pd": "pandas",
    "nn": "torch.nn", "pa": "pyarrow", "pq": "pyarrow.parquet", "pl": "polars", "F": "torch.nn.functional",
    "events": "quietgrad.core.accounting.events",
}  # fmt: skip
"""How pages and docstrings abbreviate modules."""
IDENTIFIER = r"[A-Za-z_]\w*"
DOTTED = re.compile(rf"{IDENTIFIER}(?:\.{IDENTIFIER})*")


@dataclass
class Pool:
    """The names that the source defines and the words that it knows."""

    names: set[str] = field(default_factory=set)
    """Classes, functions, constants, attributes, fields and modules."""
    parameters: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    """Texts that the code itself reads or writes: registered names, keys of files, values of settings."""
    pieces: set[str] = field(default_factory=set)
    """Ends of names of files, as in ``f"{name}.journal"``."""
    attributes: dict[str, set[str]] = field(default_factory=dict)
    """What objects of a class have, by the class's name, whether set in its body or in a method."""


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        for one in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            if (
                isinstance(one, ast.Expr)
                and isinstance(one.value, ast.Constant)
                and isinstance(one.value.value, str)
            ):
                yield one.value


@cache
def pool() -> Pool:
    """The pool of ``src/quietgrad``, its data files included."""
    found = Pool()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {id(text) for text in _docstrings(tree)}
        found.modules |= set(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                found.words.add(node.value.strip())
                found.pieces |= set(re.findall(r"\.[\w.-]+$", node.value.strip()))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.names.add(node.name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                every += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
                found.parameters |= {one.arg for one in every}
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.names.add(node.attr)
            if isinstance(node, ast.ClassDef):
                found.attributes.setdefault(node.name, set()).update(_own(node))
                found.names |= found.attributes[node.name]
            if isinstance(node, ast.Call):  # settings that are passed on as names: a key of a file, a field
                found.parameters |= {one.arg for one in node.keywords if one.arg is not None}
        found.names |= {name for statement in tree.body for name in _bound(statement)}
    for path in SOURCE.rglob("*.toml"):
        found.words |= set(_keys(tomllib.loads(path.read_text(encoding="utf-8"))))
    for path in SOURCE.rglob("*.json"):
        found.words |= set(_keys(json.loads(path.read_text(encoding="utf-8"))))
    return found


def _bound(statement: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.TypeAlias if hasattr(ast, "TypeAlias") else ()):  # Python 3.12
        targets = [statement.name]
    elif isinstance(statement, ast.If | ast.Try):
        return {name for one in statement.body for name in _bound(one)}
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _own(kind: ast.ClassDef) -> set[str]:
    inside = {name for statement in kind.body for name in _bound(statement)}
    inside |= {one.name for one in kind.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(kind):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            inside |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return inside


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)
    elif isinstance(value, str):
        yield value


@cache
def modules() -> dict[str, Any]:
    """Every module of the package that can be imported here; adapters of engines need the engine."""
    found: dict[str, Any] = {"quietgrad": quietgrad}
    for one in walk_packages(quietgrad.__path__, "quietgrad."):
        if one.name.endswith("__main__"):
            continue
        try:
            found[one.name] = import_module(one.name)
        except ImportError:  # an engine that is an extra
            found[one.name] = None
    return found


MISSING = object()


@cache
def resolved(dotted: str) -> object:
    """What a dotted name stands for; ``MISSING`` if it stands for nothing.

    Only the package and the listed libraries are imported: a word on a page must not run a file of that name.
    """
    head, _, rest = dotted.partition(".")
    if head not in ALIASES and head not in roots():
        return MISSING
    path = f"{ALIASES.get(head, head)}{'.' if rest else ''}{rest}".split(".")
    for cut in range(len(path), 0, -1):
        name = ".".join(path[:cut])
        if path[0] == "quietgrad" and name not in modules():
            continue
        try:
            value: object = import_module(name)
        except Exception:  # no module of that name, or none that can be loaded here
            if name in modules():
                return _in_source(path[cut:], name)
            continue
        for step in path[cut:]:
            value = attribute(value, step)
            if value is MISSING:
                break
        else:
            return value
    return MISSING


def _in_source(rest: list[str], module: str) -> object:
    """A name of a module that needs an engine which is not here: read off its text."""
    text = (SOURCE.parent / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    return None if not rest or re.search(rf"\b{re.escape(rest[0])}\b", text) else MISSING


def attribute(value: object, name: str) -> object:
    """An attribute of a module or a class; of a class also what its objects have."""
    try:
        return getattr(value, name)
    except AttributeError:
        pass
    except Exception:
        return None
    for one in getattr(value, "__mro__", ()):
        if name in getattr(one, "__annotations__", {}) or name in pool().attributes.get(one.__name__, ()):
            return None
    return MISSING


@cache
def roots() -> frozenset[str]:
    """The packages that names may come from."""
    return frozenset({"quietgrad", *(name.partition(".")[0] for name in foreign()["modules"]["names"])})


@cache
def classes() -> dict[str, object]:
    """Every class of the product by its name."""
    return {
        name: value
        for module in modules().values()
        if module is not None
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__.startswith("quietgrad")
    }


@cache
def rooms() -> frozenset[str]:
    """The packages of the product, each of which a path may begin in."""
    return frozenset({name.rpartition(".")[0] for name in modules()} - {""})


@cache
def tests() -> frozenset[str]:
    """Functions and modules of the tests, which pages cite as evidence."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        found.add(path.stem)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return frozenset(name for name in found if name.startswith("test_"))


@cache
def exhibits() -> frozenset[str]:
    """What `quietgrad reproduce` can make."""
    from quietgrad.cli.reproduce import reproductions

    return frozenset(reproductions(ROOT))


@cache
def options() -> frozenset[str]:
    """Every option of the command line, long and short, and those that all commands have."""
    from typer.main import get_command

    found = {"--help", "--version", "--debug", "-h", "-V"}
    waiting = [get_command(app_of(name)) for name in COMMANDS]
    for command in waiting:
        waiting += list(getattr(command, "commands", {}).values())
        found |= {one for param in command.params for one in (*param.opts, *param.secondary_opts)}
    return frozenset(one for one in found if one.startswith("-"))


@cache
def subcommands() -> frozenset[str]:
    """Commands and their subcommands, as words of a line."""
    from typer.main import get_command

    found = {"quietgrad", *COMMANDS}
    for name in COMMANDS:
        found |= {f"{name} {sub}" for sub in getattr(get_command(app_of(name)), "commands", {})}
        found |= set(getattr(get_command(app_of(name)), "commands", {}))
    return frozenset(found)


@cache
def files() -> frozenset[str]:
    """Files and folders of the repository, each by its path and by every end of it."""
    found = set()
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if parts[0] in (".git", ".venv") or "__pycache__" in parts:
            continue
        found |= {"/".join(parts[k:]) for k in range(len(parts))}
    return frozenset(found)


@cache
def extras() -> frozenset[str]:
    """The extras of the package."""
    return frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@cache
def public_parameters() -> frozenset[str]:
    """Parameters and fields of everything that is public, options and keys of plan and run files included."""
    found: set[str] = set()
    for module in modules().values():
        for name, value in vars(module).items() if module is not None else ():
            if name.startswith("_") or not str(getattr(value, "__module__", "")).startswith("quietgrad"):
                continue
            found |= parameters(value)
            for method in vars(value).values() if inspect.isclass(value) else ():
                found |= parameters(getattr(method, "__func__", method)) if callable(method) else set()
    return frozenset(found)


def parameters(value: object) -> set[str]:
    """The parameters of a callable, and the fields of a class."""
    try:
        found = set(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = set()
    return found | set(getattr(value, "__dataclass_fields__", ()))


def is_file(text: str) -> bool:
    """Whether a text names a file or folder of the repository, or one that the code writes; patterns count."""
    path = text.strip("/").removeprefix("./")
    if path in files() or (any(mark in path for mark in "*?") and fnmatch.filter(files(), path)):
        return True
    leaf = path.rpartition("/")[2]
    if path in pool().words or leaf in pool().words:
        return True
    placeholder = re.fullmatch(r"(?:[A-Z]{2,}|<\w+>|…)(\.[\w.-]+)", leaf)
    return placeholder is not None and placeholder[1] in pool().pieces


@cache
def foreign() -> Mapping[str, Any]:
    """The words that are not the product's own: ``words`` with the reason for each, and ``modules`` to look in."""
    return tomllib.loads((ROOT / "tests" / "docs" / "foreign_names.toml").read_text(encoding="utf-8"))


@cache
def foreign_words() -> frozenset[str]:
    return frozenset(word for group in foreign()["words"].values() for word in group["names"])


def is_word(text: str) -> bool:
    """Whether the code knows a text as it stands, as a registered name, a key or a value; or the list does."""
    known = pool()
    return (
        text in known.words
        or text in foreign_words()
        or text in subcommands()
        or text in extras()
        or text in tests()
        or text in exhibits()
        or is_file(text)
        or not re.search(r"[A-Za-z]{3}", text)  # numbers, marks, symbols
    )


def is_name(name: str) -> bool:
    """Whether an identifier is a name of the code, of Python or of a listed module; two letters are maths."""
    known = pool()
    return (
        len(name) <= 2
        or name in known.names
        or name in known.modules
        or name in known.parameters
        or keyword.iskeyword(name)
        or hasattr(builtins, name)
        or is_word(name)
        or any(resolved(f"{module}.{name}") is not MISSING for module in foreign()["modules"]["names"])
    )


_TOKENS = re.compile(
    r"""(?P<text>"[^"]*"|(?<!\w)'[^']*')|(?P<option>(?<![\w-])--?[A-Za-z][\w-]*)|(?P<path>[~$.]?[\w.*<>…-]*/[\w./*<>…-]*)"""
    r"""|(?P<words>[A-Za-z]\w*(?:-[A-Za-z]\w*)+)|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)|(?P<number>\d[\w.]*)"""
    r"""|(?P<mark>\S)"""
)
_SHELL = ("pip", "python", "pytest", "make", "git", "eval", "flower", "cd", "export")


def problems(content: str, module: str = "") -> list[str]:
    """What in a text between backticks names nothing; ``module`` is the one that a docstring is of."""
    text = " ".join(content.split())
    if "://" in text or is_word(text):
        return []
    first = text.split()[0]
    if first in _SHELL or ("=" in first and first.split("=")[0].isupper()):
        return [word for word in text.split() if re.match(r"[\w./]+/\w", word) and not is_file(word)]
    if first == "quietgrad" or (" " in text and " ".join(text.split()[:2]) in subcommands()):
        line = [word for word in text.split() if word not in ("…", "...")]
        at = 1 if first == "quietgrad" else 0
        wrong = [] if len(line) <= at or line[at].startswith("-") or line[at] in COMMANDS else [line[at]]
        return wrong + [word for word in line if word.startswith("--") and word.partition("=")[0] not in options()]
    return list(_unknown(text, module))


def _unknown(text: str, module: str) -> Iterator[str]:
    tokens = [(one.lastgroup, one[0], one.end()) for one in _TOKENS.finditer(text)]
    calls: list[object] = []
    for place, (kind, token, end) in enumerate(tokens):
        after = text[end : end + 2].lstrip()
        before = tokens[place - 1][1] if place else ""
        if token == "(":
            calls.append(
                _callee(tokens[place - 1][1], module) if place and tokens[place - 1][0] == "name" else None
            )
        elif token == ")" and calls:
            calls.pop()
        elif (
            (kind == "text" and not is_word(token[1:-1]) and not _is_phrase(token[1:-1]))
            or (kind == "option" and token not in options() and not is_word(token))
            or (kind == "path" and not is_file(token) and not is_word(token))
            or (kind == "words" and not is_word(token) and not all(map(is_name, token.split("-"))))
        ):
            yield token
        elif kind == "name":
            is_keyword = re.match(r"\s*=(?!=)", text[end:]) is not None and "." not in token
            if is_keyword and calls and calls[-1] is not None:
                if token not in parameters(calls[-1]) and not _takes_any(calls[-1]):
                    yield f"{token}="
            elif is_keyword:
                if token not in public_parameters() and not is_word(token) and len(token) > 2:
                    yield f"{token}="
            elif before == "." or (after.startswith("(") and "." not in token):
                if not is_name(token):
                    yield token
            elif not is_dotted(token, module):
                yield token


def _is_phrase(text: str) -> bool:
    """A text with spaces or marks is prose or a pattern, not a name."""
    return re.search(r"[^\w.-]", text) is not None


def _callee(token: str, module: str) -> object:
    value = lookup(token, module)
    return value if callable(value) else None


def _takes_any(value: Any) -> bool:
    try:
        return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return True


@cache
def lookup(token: str, module: str = "") -> object:
    """What a name stands for, in its module or among the public names; ``MISSING`` if it stands for nothing."""
    homes = [f"{module}.", "", "quietgrad.", "quietgrad.torch.", "quietgrad.estimators.", "quietgrad.federation.",
             "quietgrad.data.", "quietgrad.objectives.", "quietgrad.assurance.audit."]  # fmt: skip
    return next((value for home in homes if (value := resolved(home.lstrip(".") + token)) is not MISSING), MISSING)


def is_dotted(token: str, module: str = "") -> bool:
    """Whether a dotted name stands for something: by import, or by its parts where the first is an object."""
    if lookup(token, module) is not MISSING or is_word(token):
        return True
    head, *rest = token.split(".")
    if not rest:
        return is_name(head)
    if head in classes():
        return attribute(classes()[head], rest[0]) is not MISSING
    if head in ALIASES or head in roots() or head[0].isupper():
        return False  # a module or a class, and it has no such attribute
    if re.search(r"\.[A-Z][a-z]", token):  # a class behind modules: of one whose path ends so
        return any(resolved(f"{home}.{token}") is not MISSING for home in rooms())
    if any(resolved(f"{home}.{token}") is not MISSING for home in rooms()):  # ledger.account: the end of a path
        return True
    if token in fields_of_files():
        return True
    # A module, or a package of earlier versions, is no object: it holds what was looked for above and no more.
    is_room = head in pool().modules | former_rooms()
    kind = head.title().replace("_", "")
    kinds = [name for name in pool().attributes if name.endswith(kind)]
    kinds = [kind] if head in former_rooms() - pool().modules and kind in kinds else kinds
    if kinds:  # result.privacy, plan.slots: an object called after its class
        known = set().union(*(pool().attributes[name] for name in kinds))
        return (rest[0] in known or (not is_room and is_word(rest[0]))) and all(map(is_name, rest))
    return not is_room and all(map(is_name, [head, *rest]))


@cache
def fields_of_files() -> frozenset[str]:
    """Dotted paths of two keys, one in the other, that a published JSON Schema has."""

    def inside(value: Any) -> Mapping[str, Any]:
        named = value.get("properties") if isinstance(value, dict) else None
        return named if isinstance(named, dict) else {}

    def paths(value: Any) -> Iterator[str]:
        for key, inner in inside(value).items():
            options = (inner, *(inner.get("anyOf") or ())) if isinstance(inner, dict) else ()
            yield from (f"{key}.{own}" for option in options for own in inside(option))
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from paths(item)

    found = (json.loads(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*schema*.json"))
    return frozenset(path for schema in found for path in paths(schema))


@cache
def former_rooms() -> frozenset[str]:
    """The first parts of old import paths, which still work and are documented nowhere but in the upgrade page."""
    return frozenset(part for old in MOVED for part in old.split(".")[1:])


def is_target(target: str, module: str = "") -> bool:
    """Whether a role's target exists: by its path, or as a name of the module that the docstring is of."""
    if lookup(target, module) is not MISSING:
        return True
    head, _, rest = target.partition(".")
    if head in classes() and (not rest or attribute(classes()[head], rest.partition(".")[0]) is not MISSING):
        return True
    inside = names_of(module)
    return head in inside and (not rest or all(part in pool().names for part in rest.split(".")))


@cache
def names_of(module: str) -> frozenset[str]:
    """What a module defines or imports, members of its classes and of their bases included."""
    value = modules().get(module)
    if value is None:
        return frozenset(pool().names)
    found = set(vars(value)) | set().union(*pool().attributes.values()) if module == "" else set(vars(value))
    for kind in list(vars(value).values()):
        if inspect.isclass(kind):
            found |= set(dir(kind)).union(*(pool().attributes.get(one.__name__, set()) for one in kind.__mro__))
    path = SOURCE.parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(
        found
        | {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
    )
