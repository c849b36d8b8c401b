"""`xspec version`: what is installed. Reads package metadata only, so torch is not imported."""

from __future__ import annotations

import json
import platform

import click

from core.facts import package_version

PACKAGES = (
    "torch",
    "torch_npu",
    "numpy",
    "scipy",
    "safetensors",
    "tokenizers",
    "fastapi",
    "uvicorn",
    "pyzmq",
)


def versions() -> dict[str, str | None]:
    """Name to version; None for what is not installed."""
    found = {name: package_version(name) for name in PACKAGES}
    return {"xspec": package_version("xspec"), "python": platform.python_version(), **found}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Print the versions of xspec and of what it runs on."""
    found = versions()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, number in found.items():
        if number is not None:
            click.echo(f"{name} {number}")
