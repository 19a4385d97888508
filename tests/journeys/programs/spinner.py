"""An agent that burns a core while it is awake. Standard library only."""


def main() -> None:
    count = 0
    while True:
        count += 1


if __name__ == "__main__":
    main()
