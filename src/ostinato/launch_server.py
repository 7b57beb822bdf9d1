"""`python -m ostinato.launch_server --model M`: the same as `ostinato serve --model M`."""

import sys

from ostinato.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()
