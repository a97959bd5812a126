"""`quietgrad completion`: typer's script that makes a shell complete commands and options."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from typer import Argument
from typer._completion_shared import get_completion_script

from quietgrad.cli.options import say

app = typer.Typer(add_completion=False)
_SHELLS = {
    "bash": 'eval "$(quietgrad completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(quietgrad completion zsh)" in ~/.zshrc',
    "fish": "quietgrad completion fish | source in ~/.config/fish/config.fish",
}


@app.command(epilog='Example: eval "$(quietgrad completion bash)"')
def completion(shell: Annotated[str, Argument(help="bash, zsh or fish; else the shell you are in.")] = "") -> None:
    """Print the script that makes a shell complete commands and options."""
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in _SHELLS:
        raise typer.BadParameter(f"{name or 'no shell'!r}: must be bash, zsh or fish.", param_hint="SHELL")
    if os.isatty(1):
        say(f"# use it with: {_SHELLS[name]}", err=True)
    say(get_completion_script(prog_name="quietgrad", complete_var="_QUIETGRAD_COMPLETE", shell=name))
