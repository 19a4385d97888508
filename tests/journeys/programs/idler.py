"""An agent that is awake and waits: its requests are made in its name, by the test. Standard library only."""

import signal


def main() -> None:
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
