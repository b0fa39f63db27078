#!/usr/bin/env python3
"""Writes the dashboards to `dashboards/`, or with --check compares and exits 1 where one differs.

python3 grafana/build.py [--check]
"""

import argparse
import json
import pathlib
import sys

from boards import drafts, health, helping, why

FOLDER = pathlib.Path(__file__).resolve().parent / "dashboards"
BOARDS = (helping.board, why.board, drafts.board, health.board)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the Grafana dashboards.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 if a file is not what would be written"
    )
    check = parser.parse_args().check
    texts = {
        FOLDER / f"{board.name}.json": json.dumps(board.json(), indent=2, ensure_ascii=False) + "\n"
        for board in (make() for make in BOARDS)
    }
    if check:
        stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        stale += sorted(set(FOLDER.glob("*.json")) - set(texts))
        for path in stale:
            print(f"{path.relative_to(FOLDER.parent.parent)} is not what grafana/build.py writes", file=sys.stderr)
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
