"""The `verl-dppo` command; each subcommand is a module with `add_arguments` and `run`."""

import argparse
import importlib
from collections.abc import Sequence

SUBCOMMANDS = {
    "check": "say what is registered with verl, in which versions, and why not",
    "demo": "train GRPO and DPPO on a small task on this machine's CPU, and compare them",
    "gsm8k": "prepare GSM8K for verl",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    parser = argparse.ArgumentParser(prog="verl-dppo", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in SUBCOMMANDS}
    for name, summary in SUBCOMMANDS.items():
        modules[name].add_arguments(subparsers.add_parser(name, help=summary, description=modules[name].__doc__))
    parsed = parser.parse_args(arguments)
    return int(modules[parsed.command].run(parsed))
