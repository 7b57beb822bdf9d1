"""`python -m ostinato`, and the command `ostinato`."""

import signal

# Ctrl-C before there is anything to interrupt ends the process without a word.
_usual = signal.signal(signal.SIGINT, signal.SIG_DFL)

from ostinato.cli.main import main  # noqa: E402

signal.signal(signal.SIGINT, _usual)

if __name__ == "__main__":
    main()
