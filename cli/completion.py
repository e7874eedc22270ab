"""svdq completion: a script that completes commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = {
    "bash": "svdq completion bash >> ~/.bashrc",
    "zsh": "svdq completion zsh >> ~/.zshrc",
    "fish": "svdq completion fish > ~/.config/fish/completions/svdq.fish",
}


@click.command("completion", epilog="\b\nInstall it with one of\n  " + "\n  ".join(SHELLS.values()))
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def command(context, shell):
    """Print the script that lets SHELL complete svdq's commands and options."""
    made = get_completion_class(shell)
    assert made is not None  # click has these three
    click.echo(made(context.find_root().command, {}, "svdq", "_SVDQ_COMPLETE").source())
    return 0
