"""`python -m ostinato.launch_server --model M`: the same as `ostinato serve --model M`."""

import sys

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    import ostinato.__main__  # noqa: F401
