"""Write the Grafana dashboards: `python -m dashboards.build [--check]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dashboards import overview, speculation

FOLDER = Path(__file__).resolve().parent / "grafana"


def render() -> dict[str, str]:
    """File name to text, the same on every machine."""
    documents = (overview.build(), speculation.build())
    return {f"{document['uid']}.json": json.dumps(document, indent=2) + "\n" for document in documents}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dashboards.build", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a file is not up to date"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for name, text in render().items():
        path = FOLDER / name
        if check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} is not up to date: run python -m dashboards.build")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
