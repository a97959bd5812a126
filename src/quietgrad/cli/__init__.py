"""The command line: one file per command, imported only when that command is run.

Exit codes are 0 (fine), 1 (refused, or a check failed) and 2 (bad usage). An error is one sentence on stderr;
``--debug`` anywhere on the line adds the traceback.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any, cast

from quietgrad import __version__
from quietgrad.core.errors import QuietgradError, SettingError
from quietgrad.core.files import os_error_text
from quietgrad.core.sanitize import sanitize, sanitize_lines
from quietgrad.data.address import public

COMMANDS: dict[str, str] = {
    "demo": "train a first private model and leave a report",
    "describe": "private counts, means, quantiles and histograms of a file",
    "check": "what training on a file would waste, for its owner alone",
    "train": "train a model on a file or a registered data set",
    "resume": "continue an interrupted training, bit for bit, without spending twice",
    "predict": "score records with a trained model",
    "evaluate": "private scores of held-out people",
    "plan": "say what a run would release and cost, before it touches data",
    "account": "ε of a described run",
    "calibrate": "noise or steps for a budget",
    "ledger": "what was spent, by account; check the file; set caps",
    "keys": "keys of unfinished runs, and new keys to sign with",
    "report": "one self-contained page: curves, comparison, privacy certificate",
    "card": "a model card: data as declared, guarantee, private scores, intended use",
    "frontier": "accuracy against ε, with what the search itself costs",
    "certificate": "a run's claim as a file that others can check, signed if you like",
    "verify": "prove a certificate again, by two accountants",
    "audit": "empirical lower bounds on ε against what is claimed",
    "federate": "training between parties that do not trust each other",
    "reproduce": "a paper's table or figure beside ours",
    "data": "registered data sets: list, fetch, find",
    "completion": "make a shell complete commands and options",
}
"""Command and one line of help."""
_HOMES = {
    "resume": "train.resume_app",
    "evaluate": "predict.evaluate_app",
    "account": "accounting.account_app",
    "calibrate": "accounting.calibrate_app",
    "keys": "ledger.keys_app",
    "card": "report.card_app",
    "frontier": "report.frontier_app",
    "certificate": "certificates.certificate_app",
    "verify": "certificates.verify_app",
}
"""Where a command's typer app is, if not in ``cli/NAME.py`` as ``app``."""
_COMPLETE = "_QUIETGRAD_COMPLETE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    >>> main(["--version"])
    quietgrad 0.3.0
    0
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    if debug:
        args.remove("--debug")
    if _COMPLETE in os.environ:  # a shell asks what can stand where
        return _complete()
    name, code = "", cast(object, 0)
    try:
        # Before anything else sees the line: from here on, addresses in it have no login and no query as texts.
        name, *rest = [public(word) for given in args for word in _words(given)] or ["--help"]
        if name in ("-h", "--help", "help"):
            print(_help())
        elif name in ("-V", "--version"):
            print(f"quietgrad {__version__}")
        elif name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1)
            advice = f"did you mean `quietgrad {near[0]}`?" if near else "see `quietgrad --help`."
            what = "option" if name.startswith("-") else "command"
            print(sanitize(f"quietgrad: {name!r} is no {what}; {advice}"), file=sys.stderr)
            code = 2
        else:
            from typer.main import get_command

            with warnings.catch_warnings():
                warnings.showwarning = _show_warning  # type: ignore[assignment]
                command = get_command(app_of(name))
                code = command.main(rest, prog_name=f"quietgrad {name}", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes
        return 1
    except Exception as error:
        if debug:
            print(sanitize_lines(traceback.format_exc()), file=sys.stderr)
        return _refuse(name, error)


_WITH_ADDRESS = re.compile(r"(--[A-Za-z][\w-]*)=(.*://.*)", re.DOTALL)


def _words(word: str) -> Sequence[str]:
    """An option that holds an address, ``--test=s3://…``, as two words."""
    split = _WITH_ADDRESS.fullmatch(word)
    return (word,) if split is None else split.groups()


def app_of(name: str) -> Any:
    """The typer app of a command."""
    module, _, attribute = _HOMES.get(name, f"{name}.app").partition(".")
    return resolve_name(f"{__name__}.{module}:{attribute}")


def _complete() -> int:
    """Answer a shell; of all commands only the one that was typed is loaded."""
    import typer
    from typer.main import get_command

    typed = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    whole = typer.Typer(add_completion=True)
    for name, line in COMMANDS.items():
        app = app_of(name) if name in typed[1:2] else None
        if app is not None and len(app.registered_commands) > 1:
            whole.add_typer(app, name=name)
        else:
            whole.command(name, help=line)(app.registered_commands[0].callback if app else lambda: None)
    get_command(whole).main(prog_name="quietgrad", complete_var=_COMPLETE)
    return 0


def _refuse(name: str, error: Exception) -> int:
    """Say what went wrong in one sentence; 2 if the command was given wrongly, else 1."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # an error of the argument parser
        context = vars(error).get("ctx")
        path = f"quietgrad {name}" if context is None else context.command_path
        text = " ".join(str(error.format_message()).split()) or "no command was given."
        print(sanitize(f"quietgrad {name}: {text} (see `{path} --help`)"), file=sys.stderr)
        return int(error.exit_code)
    if isinstance(error, SettingError):  # a mistake on the command line, as those of the parser
        text = " ".join(error.spelled(_spelling(name)).split())
        print(sanitize(f"quietgrad {name}: {text} [{error.code}] (see `quietgrad {name} --help`)"), file=sys.stderr)
        return 2
    if isinstance(error, QuietgradError):
        text = f"{error.spelled(_spelling(name))} [{error.code}]"
    elif isinstance(error, ValueError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {os_error_text(error)}." if error.filename else f"{os_error_text(error)}."
    else:
        text = f"{type(error).__name__}: {error} (run again with --debug to see where.)"
    print(sanitize(f"quietgrad {name}: {' '.join(text.split())}"), file=sys.stderr)
    return 1


_SPELLINGS = {("budget", "None"): "--non-private"}  # arguments of Python whose options have another name


def _spelling(name: str) -> Callable[[str, str], str]:
    """Return how a command spells an argument of Python: as its own option, else as ``--set``, else as Python does.

    >>> train = _spelling("train")
    >>> train("epsilon", "-1.0"), train("classes", "(1, 2)"), train("relation", "'replace-one'"), train("n", "4")
    ('--epsilon -1.0', '--classes 1,2', '--relation replace-one', 'n=4')
    >>> train("budget", "None"), train("allow_http", "True"), train("mechanism", "'pure'")
    ('--non-private', '--allow-http', '--set mechanism=pure')
    >>> _spelling("calibrate")("budget", "None")
    '--non-private to `quietgrad train`'
    """
    options = _options_of(name)

    def spelled(argument: str, value: str) -> str:
        text = ",".join(part.strip().strip("'\"") for part in value.strip("([])").split(",") if part.strip())
        flag = f"--{argument.replace('_', '-')}"
        if (argument, value) in _SPELLINGS:
            flag = _SPELLINGS[argument, value]
            return flag if flag in options else f"{flag} to `quietgrad train`"
        if flag in options:
            return flag if options[flag] else f"{flag} {text}".rstrip()
        if "--set" in options and argument in _settings():
            return f"--set {argument}={text}"
        return f"{argument}={value}"

    return spelled


def _options_of(name: str) -> dict[str, bool]:
    """The options of a command and of those below it, and whether each is a flag without a value."""
    from typer.main import get_command

    commands: list[Any] = [get_command(app_of(name))] if name in COMMANDS else []
    options: dict[str, bool] = {}
    while commands:
        command = commands.pop()
        commands.extend(getattr(command, "commands", {}).values())
        for parameter in command.params:
            options |= {each: getattr(parameter, "is_flag", False) for each in parameter.opts}
    return options


def _settings() -> set[str]:
    """The settings that algorithms take by ``--set``."""
    from quietgrad.core.settings import fields_of
    from quietgrad.methods.registry import ALGORITHMS

    return {setting for entry in ALGORITHMS.values() for setting in fields_of(entry.kind)}


def _show_warning(message: Warning | str, *_: object) -> None:
    print(sanitize(f"warning: {' '.join(str(message).split())}"), file=sys.stderr)


def _help() -> str:
    width = max(map(len, [*COMMANDS, "--version"])) + 2
    return "\n".join(
        [
            "Usage: quietgrad COMMAND [OPTIONS]",
            "",
            "Differentially private training with a proved ε.",
            "",
            "Commands:",
            *(f"  {name:<{width}}{line}" for name, line in COMMANDS.items()),
            "",
            "Options:",
            f"  {'--help':<{width}}this page; `quietgrad COMMAND --help` for a command's own",
            f"  {'--version':<{width}}the version",
            f"  {'--debug':<{width}}show the traceback of an error",
            "",
            "Example: quietgrad train a9a --algorithm dp-srm --epsilon 1 --delta 1e-5 --out runs/a9a",
        ]
    )
