"""`python -m ostinato.launch_server --model M`: the same as `ostinato serve --model M`."""

import sys

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    from ostinato.__main__ import main

    main()
