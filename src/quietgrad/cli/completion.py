"""`quietgrad completion`: what a shell needs to finish words; the commands themselves say what can stand where."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

from quietgrad.cli.options import say

app = typer.Typer(add_completion=False)

_SCRIPTS = {
    "bash": """_quietgrad() {
    local IFS=$'\\n'
    COMPREPLY=($(quietgrad completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _quietgrad quietgrad""",
    "zsh": """#compdef quietgrad
_quietgrad() {
    local -a found
    found=("${(@f)$(quietgrad completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -- $found; else _files; fi
}
compdef _quietgrad quietgrad""",
    "fish": """function __quietgrad_words
    quietgrad completion words -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null
end
complete -c quietgrad -a '(__quietgrad_words)'""",
}
_HOW = {
    "bash": 'eval "$(quietgrad completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(quietgrad completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "quietgrad completion fish > ~/.config/fish/completions/quietgrad.fish",
}


@app.command(epilog='Example: eval "$(quietgrad completion bash)"')
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish; else the shell you are in.")] = "",
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Print the script that makes a shell complete commands, options, algorithms and data sets."""
    if shell == "words":  # what the scripts ask
        for word in candidates(list(words or [""])):
            say(word)
        return
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in _SCRIPTS:
        raise typer.BadParameter(f"{name or 'no shell'!r}: must be bash, zsh or fish.", param_hint="SHELL")
    if os.isatty(1):
        say(f"# use it with: {_HOW[name]}", err=True)
    say(_SCRIPTS[name])


def candidates(words: list[str]) -> list[str]:
    """What the last of ``words``, which follow ``quietgrad``, may become.

    >>> candidates(["tra"]), candidates(["ledger", "ver"]), candidates(["train", "--algorithm", "dp-sr"])
    (['train'], ['verify'], ['dp-srm'])
    """
    *before, last = words
    return [word for word in _possible(before, last) if word.startswith(last)]


def _possible(before: list[str], last: str) -> Iterable[str]:
    from quietgrad.cli import __name__ as home
    from quietgrad.cli import available

    if not before:
        return available()
    if before[0] not in available():
        return ()
    from typer.main import get_command

    command: Any = get_command(import_module(f"{home}.{before[0]}").app)
    inside: dict[str, Any] = getattr(command, "commands", {})
    if inside:
        if len(before) == 1:
            return inside
        command = inside.get(before[1])
        if command is None:
            return ()
    if before[-1].startswith("--") and (known := _values(before[-1])):
        return known
    options = [spelling for parameter in command.params for spelling in _spellings(parameter)]
    return options if last.startswith("-") else _values(before[0])


def _spellings(parameter: Any) -> list[str]:
    hidden = getattr(parameter, "hidden", False) or parameter.param_type_name != "option"
    return (
        [] if hidden else [text for text in (*parameter.opts, *parameter.secondary_opts) if text.startswith("--")]
    )


def _values(what: str) -> list[str]:
    """Public words that can follow an option or a command; files are the shell's own business."""
    from quietgrad.algorithms.registry import ALGORITHMS

    known: dict[str, Iterable[str]] = {
        "--algorithm": ALGORITHMS,
        "plan": ALGORITHMS,
        "audit": ALGORITHMS,
        "--relation": ("add-remove", "replace-one"),
        "--sampling": ("poisson", "fixed-size", "full", "single-pass", "turns", "poisson-turns"),
        "--task": ("binary", "multiclass", "regression"),
        "--objective": ("logistic", "multinomial", "huber", "squared", "hinge"),
        "--rows": ("clip", "normalize"),
        "--accountant": ("best", "gaussian-exact", "pure", "pld", "zcdp", "rdp"),
        "completion": _SCRIPTS,
    }
    if what in ("train", "frontier"):
        from quietgrad.data.registry import REGISTRY

        return sorted(REGISTRY)
    return list(known.get(what, ()))
