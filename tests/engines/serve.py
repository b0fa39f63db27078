#!/usr/bin/env python3
"""Serves the bundled target with a real engine until it is ended.

    serve.py llama|vllm [--variant plain|house|inflated] [--port N] [-- more arguments of the engine]
"""

import argparse
import os

import engine


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=engine.ENGINES)
    parser.add_argument("--variant", default="plain", choices=engine.VARIANTS)
    parser.add_argument("--port", type=int, default=8000)
    args, extra = parser.parse_known_args()
    argv, environment = engine.command(args.engine, args.variant, args.port, [a for a in extra if a != "--"])
    os.execve(argv[0], argv, environment)


if __name__ == "__main__":
    main()
